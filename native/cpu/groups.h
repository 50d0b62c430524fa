// From the chunks to the groups of a sample: statistics, and the parameters of
// the maps.
//
// Channels [begin, end) are those of the sample's range of groups. Other ranges
// of the same sample run at the same time: stores do not go past `end`.
#pragma once

#include "native/cpu/rows.h"

namespace gn_override {
namespace {

using cpu::Affine;
using cpu::Gradient;
using cpu::Sample;

constexpr int64_t kDoubleLanes = kLanes<double>;

inline int64_t rows_of(const Sample& sample, int64_t chunk) {
  return chunk + 1 < sample.chunks ? sample.rows_per_chunk
                                   : sample.HxW - chunk * sample.rows_per_chunk;
}

template <typename A>
inline const A* partial(const Sample& sample, int64_t chunk, int which) {
  return as<A>(sample.partials) + (2 * chunk + which) * sample.stride;
}

inline double add_lanes(DoubleVector lanes) {
  double total = 0;
#pragma GCC unroll 8
  for (int64_t lane = 0; lane < kDoubleLanes; ++lane) {
    total += lanes[lane];
  }
  return total;
}

inline double sum(const double* values, int64_t count) {
  DoubleVector lanes{};
  int64_t i = 0;
  for (; i + kDoubleLanes <= count; i += kDoubleLanes) {
    lanes += load(values + i);
  }
  double total = i > 0 ? add_lanes(lanes) : 0;
  for (; i < count; ++i) {
    total += values[i];
  }
  return total;
}

template <typename A>
inline double dot(const A* a, const double* b, int64_t count) {
  DoubleVector lanes{};
  int64_t i = 0;
  for (; i + kDoubleLanes <= count; i += kDoubleLanes) {
    lanes += load_double(a + i) * load(b + i);
  }
  double total = i > 0 ? add_lanes(lanes) : 0;
  for (; i < count; ++i) {
    total += static_cast<double>(a[i]) * b[i];
  }
  return total;
}

template <typename A>
inline void fill(A* array, int64_t count, A value) {
  const auto v = broadcast<Vector<A>>(value);
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) {
    store(array + i, v);
  }
  for (; i < count; ++i) {
    array[i] = value;
  }
}

template <typename A>
inline void multiply(A* array, int64_t count, A factor) {
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) {
    store(array + i, load(array + i) * factor);
  }
  for (; i < count; ++i) {
    array[i] *= factor;
  }
}

// The first of the fold copies of [begin, end) to the others.
template <typename A>
inline void
copy_folds(A* array, int64_t begin, int64_t end, int64_t C, int64_t fold) {
  for (int64_t j = 1; j < fold; ++j) {
    for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
      store<kTail>(array + j * C + v, n, load<kTail>(array + v, n));
    });
  }
}

// gamma or beta.
template <bool kTail, typename P>
inline Vector<Accumulator<P>> load_parameter(const P* p, int64_t n) {
  return without_payload(load<kTail>(p, n));
}

// Element g of mean or rstd.
template <typename P>
inline Accumulator<P>
load_statistic(const Sample& sample, const void* statistics, int64_t g) {
  return without_payload(
      sample.wide_statistics ? as<Accumulator<P>>(statistics)[g]
                             : load_one(as<P>(statistics) + g));
}
template <typename P>
inline void store_statistic(
    const Sample& sample,
    void* statistics,
    int64_t g,
    Accumulator<P> value) {
  if (sample.wide_statistics) {
    as<Accumulator<P>>(statistics)[g] = value;
  } else {
    store_one(as<P>(statistics) + g, value);
  }
}

template <typename P>
void finish_statistics(
    const Sample& sample,
    const void* gamma_,
    const void* beta_,
    double eps,
    void* mean,
    void* rstd,
    const Affine& affine) {
  using A = Accumulator<P>;
  const P* gamma = as<P>(gamma_);
  const P* beta = as<P>(beta_);
  A* center = as<A>(affine.center);
  A* scale = as<A>(affine.scale);
  A* shift = as<A>(affine.shift);
  double* sums = sample.scratch;
  double* means = sample.scratch + sample.stride;
  const int64_t D = sample.D;
  const int64_t begin = sample.group_begin * D;
  const int64_t end = sample.group_end * D;
  const double count = static_cast<double>(D) * sample.HxW;

  // Relative to one channel's mean: those of a constant group do not round.
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    const double origin = partial<A>(sample, 0, 0)[g * D];
    fill(means + g * D, D, origin - origin == 0 ? origin : 0.0);
  }
  for_columns<kDoubleLanes>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    const DoubleVector origin = load<kTail>(means + v, n);
    DoubleVector total{};
    for (int64_t k = 0; k < sample.chunks; ++k) {
      total += (load_double(partial<A>(sample, k, 0) + v) - origin) *
          static_cast<double>(rows_of(sample, k));
    }
    store<kTail>(sums + v, n, total);
  });
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    fill(means + g * D, D, means[g * D] + sum(sums + g * D, D) / count);
  }
  for_columns<kDoubleLanes>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    const DoubleVector m = load<kTail>(means + v, n);
    DoubleVector total{};
    for (int64_t k = 0; k < sample.chunks; ++k) {
      const DoubleVector d = load_double(partial<A>(sample, k, 0) + v) - m;
      total += load_double(partial<A>(sample, k, 1) + v);
      total += d * d * static_cast<double>(rows_of(sample, k));
    }
    store<kTail>(sums + v, n, total);
  });
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    const double m = means[g * D];
    const double r =
        without_payload(1 / __builtin_sqrt(sum(sums + g * D, D) / count + eps));
    const A rounded = static_cast<A>(m);
    const A rest = static_cast<A>(m - static_cast<double>(rounded));
    store_statistic<P>(sample, mean, g, rounded);
    store_statistic<P>(sample, rstd, g, static_cast<A>(r));
    fill(center + g * D, D, rounded);
    fill(scale + g * D, D, static_cast<A>(r));
    fill(shift + g * D, D, rest);
  }
  for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    using V = Vector<A>;
    V a = load<kTail>(scale + v, n);
    V b{};
    if (gamma) {
      a *= load_parameter<kTail>(gamma + v, n);
    }
    if (beta) {
      b = load_parameter<kTail>(beta + v, n);
    }
    b = fma(-load<kTail>(shift + v, n), a, b);
    store<kTail>(scale + v, n, a);
    store<kTail>(shift + v, n, b);
  });
  copy_folds(center, begin, end, sample.C, sample.fold);
  copy_folds(scale, begin, end, sample.C, sample.fold);
  copy_folds(shift, begin, end, sample.C, sample.fold);
}

template <typename P>
void expand_parameters(
    const Sample& sample,
    const void* gamma_,
    const void* beta_,
    const void* mean,
    const void* rstd,
    const Gradient& gradient) {
  using A = Accumulator<P>;
  using V = Vector<A>;
  const P* gamma = as<P>(gamma_);
  const P* beta_in = as<P>(beta_);
  A* center = as<A>(gradient.center);
  A* dZ_scale = as<A>(gradient.dZ_scale);
  A* beta = as<A>(gradient.beta);
  const int64_t D = sample.D;
  const int64_t begin = sample.group_begin * D;
  const int64_t end = sample.group_end * D;
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    fill(center + g * D, D, load_statistic<P>(sample, mean, g));
  }
  copy_folds(center, begin, end, sample.C, sample.fold);
  if (gradient.activation == Activation::kIdentity) {
    return;
  }
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    fill(dZ_scale + g * D, D, load_statistic<P>(sample, rstd, g));
  }
  for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    if (gamma) {
      const V r = load<kTail>(dZ_scale + v, n);
      store<kTail>(dZ_scale + v, n, r * load_parameter<kTail>(gamma + v, n));
    }
    store<kTail>(
        beta + v, n, beta_in ? load_parameter<kTail>(beta_in + v, n) : V{});
  });
  copy_folds(dZ_scale, begin, end, sample.C, sample.fold);
  copy_folds(beta, begin, end, sample.C, sample.fold);
}

// With M = D * HxW, r = rstd, xhat = (X - mean) * r and sums over the group,
//   dX = r * (gamma dZ - sum(gamma dZ) / M - xhat * sum(gamma dZ xhat) / M).
template <typename P>
void finish_sums(
    const Sample& sample,
    const void* gamma_,
    const void* rstd,
    const Gradient& gradient) {
  using A = Accumulator<P>;
  const P* gamma = as<P>(gamma_);
  A* dZ_scale = as<A>(gradient.dZ_scale);
  A* X_scale = as<A>(gradient.X_scale);
  A* shift = as<A>(gradient.shift);
  double* dgamma = sample.scratch;
  double* dbeta = sample.scratch + sample.stride;
  const int64_t D = sample.D;
  const int64_t begin = sample.group_begin * D;
  const int64_t end = sample.group_end * D;
  const double count = static_cast<double>(D) * sample.HxW;

  for_columns<kDoubleLanes>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    DoubleVector sum_X{};
    DoubleVector sum_1{};
    for (int64_t k = 0; k < sample.chunks; ++k) {
      sum_X += load_double(partial<A>(sample, k, 0) + v);
      sum_1 += load_double(partial<A>(sample, k, 1) + v);
    }
    store<kTail>(dgamma + v, n, sum_X);
    store<kTail>(dbeta + v, n, sum_1);
  });
  // dZ_scale holds gamma until its sums are known.
  for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    store<kTail>(
        dZ_scale + v,
        n,
        gamma ? load_parameter<kTail>(gamma + v, n)
              : broadcast<Vector<A>>(A(1)));
  });
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    const int64_t c = g * D;
    const A rounded = load_statistic<P>(sample, rstd, g);
    const double r = static_cast<double>(rounded);
    const double sum_X = dot(dZ_scale + c, dgamma + c, D);
    const double sum_1 = dot(dZ_scale + c, dbeta + c, D);
    multiply(dgamma + c, D, r);
    multiply(dZ_scale + c, D, rounded);
    // In this order: r^3 alone underflows where X is huge.
    fill(X_scale + c, D, static_cast<A>(-r * (r * (r * sum_X)) / count));
    fill(shift + c, D, static_cast<A>(-r * sum_1 / count));
  }
  copy_folds(dZ_scale, begin, end, sample.C, sample.fold);
  copy_folds(X_scale, begin, end, sample.C, sample.fold);
  copy_folds(shift, begin, end, sample.C, sample.fold);
}

inline void add_totals(const double* sums, int64_t count, double* totals) {
  for_columns<kDoubleLanes>(0, count, [&]<bool kTail>(int64_t v, int64_t n) {
    store<kTail>(
        totals + v, n, load<kTail>(totals + v, n) + load<kTail>(sums + v, n));
  });
}

template <typename P>
void store_totals(const double* totals, int64_t count, void* gradient) {
  P* out = as<P>(gradient);
  for (int64_t c = 0; c < count; ++c) {
    store_one(out + c, static_cast<Accumulator<P>>(totals[c]));
  }
}

} // namespace
} // namespace gn_override
