// The kernels of one instruction set as a table of functions: all that crosses
// between cpu.cpp, which schedules them, and the kernels_*.cpp files.
//
// A row is a run of C elements, one pixel. A chunk is a run of consecutive rows
// of one sample. Kernels read a chunk as rows of fold * C elements, so that a
// row has many vectors, and whole ones, also where C is small or odd; rows left
// over by the fold make a last, shorter row.
//
// "Accumulators" are double for double elements and float for all others.
// Arrays are padded: a full vector may be loaded at any of their elements.
#pragma once

#include <cstdint>

#include "native/plan/problem.h"
#include "native/plan/rows_cpu.h"

namespace gn_override::cpu {

// The rows of one chunk.
struct Chunk {
  int64_t rows;
  int64_t C;
  int64_t fold; // fold == 1 or fold * C <= kMaxFoldedRow
  bool stream; // write the output past the caches where that is possible
  int64_t ahead; // bytes: how far ahead of its reads memory is asked for; or 0
};

// Groups [group_begin, group_end) of one sample, and the partial results of its
// chunks: `chunks` of them with `rows_per_chunk` rows each, the last with what
// is left of HxW. Each chunk has two arrays of `stride` accumulators.
struct Sample {
  int64_t group_begin;
  int64_t group_end;
  int64_t D;
  int64_t C;
  int64_t HxW;
  int64_t fold;
  int64_t chunks;
  int64_t rows_per_chunk;
  int64_t stride;
  bool wide_statistics; // mean and rstd are accumulators, not parameters
  const void* partials;
  double* scratch; // [2][stride]
};

// Y = activation((X - center) * scale + shift), each [fold * C] accumulators.
// center is the mean rounded to an accumulator, and shift makes up for the
// rounding.
struct Affine {
  void* center;
  void* scale;
  void* shift;
  Activation activation;
};

// dX = dZ * dZ_scale + (X - center) * X_scale + shift, each [fold * C], where
// dZ is dY, or with an activation
//   dZ = dY * activation'((X - center) * dZ_scale + beta).
struct Gradient {
  void* center;
  void* dZ_scale;
  void* X_scale;
  void* shift;
  void* beta; // read if there is an activation
  Activation activation;
};

// By the type of X.
struct ElementKernels {
  // (mean, M2 = sum of squared deviations from the mean) of each channel.
  void (*moments)(const void* X, Chunk chunk, void* mean, void* M2);
  void (*normalize)(const void* X, void* Y, Chunk chunk, const Affine& affine);
  // (sum of dZ * (X - center), sum of dZ) of each channel. With an activation,
  // dZ is where to store it, or null. input_gradient() takes it as the dY of an
  // identity; its dX may be the same memory.
  void (*gradient_sums)(
      const void* dY,
      const void* X,
      void* dZ,
      Chunk chunk,
      const Gradient& gradient,
      void* dZ_X,
      void* dZ_1);
  void (*input_gradient)(
      const void* dY,
      const void* X,
      void* dX,
      Chunk chunk,
      const Gradient& gradient);
};

// By the type of gamma and beta; mean and rstd point to the sample's first
// group.
struct ParameterKernels {
  // The chunks' moments -> mean, rstd, affine.
  void (*finish_statistics)(
      const Sample& sample,
      const void* gamma,
      const void* beta,
      double eps,
      void* mean,
      void* rstd,
      const Affine& affine);
  // What gradient_sums() reads of a gradient.
  void (*expand_parameters)(
      const Sample& sample,
      const void* gamma,
      const void* beta,
      const void* mean,
      const void* rstd,
      const Gradient& gradient);
  // The chunks' gradient sums -> the rest of gradient; leaves the sample's own
  // dgamma [stride] and dbeta [stride] in scratch.
  void (*finish_sums)(
      const Sample& sample,
      const void* gamma,
      const void* rstd,
      const Gradient& gradient);
  // totals[0, count) -> gradient of a parameter.
  void (*store_totals)(const double* totals, int64_t count, void* gradient);
};

struct Kernels {
  const char* name;
  // totals += sums, `count` of them.
  void (*add_totals)(const double* sums, int64_t count, double* totals);
  ElementKernels element[4]; // by DType
  ParameterKernels parameter[4]; // by DType
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAVX2Kernels;
extern const Kernels kAVX512Kernels;
#endif

} // namespace gn_override::cpu
