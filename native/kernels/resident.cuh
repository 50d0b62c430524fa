// Group normalisation of [N, HxW, C] tensors that keeps X (and dY) on chip
// between statistics and normalisation: what resident_forward.cuh and
// resident_backward.cuh share.
//
// An item is one sample's tile, of whole groups. Several blocks share one:
// each takes a split of the item's pixels, reduces it, exchanges results with
// the others, and computes its part of the output from what it kept. A thread's
// vectors are its own: it copies them to shared memory and reads them back, so
// the slab needs no barrier.
//
//   cluster    The blocks of an item are a cluster, which keeps all of it; or,
//              backward with kAllSamples, the blocks of a tile's items of all
//              samples are one, which then adds up dgamma and dbeta itself.
//              Several blocks on a multiprocessor overlap one's loads with
//              another's stores.
//   whole chip A cooperative launch of a block to each multiprocessor works on
//              `samples` samples at a time, in waves, and reads what it cannot
//              keep again.
#pragma once

#include "native/kernels/exchange.cuh"
#include "native/kernels/slab.cuh"
#include "native/plan/shared_memory.h"

namespace gn_override {

// How the whole chip walks the samples; a cluster has one wave.
struct Waves {
  int count;
  FastDivisor samples; // of a wave, or of a cluster
  FastDivisor cluster; // its blocks
  int places; // of a thread's ring
  int cached; // pixels of a thread, see Retention
  // What the L2 cache is asked for before its time, 0: nothing. The whole chip:
  // so many pixels of each thread in its next wave; a cluster: what the block
  // so many blocks later reads.
  int pixels_ahead;
  int blocks_ahead;
};

template <bool kWholeChip, typename Value>
using Exchange =
    std::conditional_t<kWholeChip, ChipExchange<Value>, ClusterExchange<Value>>;

// Parts that a lane holds while it merges those of a group, at most. A
// cluster's blocks, up to 16, leave 32 or fewer, one for each lane; the chip's
// a part each.
template <bool kWholeChip>
constexpr int kHeldParts = kWholeChip ? 5 : 1;

// Blocks in cluster order: splits, then tiles, then samples of the first wave;
// where a cluster has all samples, these come before the tiles.
template <bool kAllSamples = false>
__device__ __forceinline__ Position position_in_cluster_order(
    const Shape& shape,
    const Tiling& tiling,
    const Waves& waves,
    int vector,
    int block) {
  const int item = tiling.splits.quotient(block);
  const FastDivisor& inner = kAllSamples ? waves.samples : tiling.column_tiles;
  const int outer = inner.quotient(item);
  const int rest = item - outer * inner.divisor();
  return Position(
      shape,
      tiling,
      vector,
      kAllSamples ? rest : outer,
      block - item * tiling.splits.divisor(),
      kAllSamples ? outer : rest);
}

// What a block works on in all waves, but for the sample.
template <int kVector>
struct Item {
  int first_channel; // of the tile
  int channels;
  int first_group; // all of the tile's groups are whole
  int groups;
  int parts_of_block; // that fold_segments() leaves of a group
  int parts; // of a group: of all blocks

  __device__
  Item(const Shape& shape, const Tiling& tiling, const Position& at) {
    const int width = tiling.columns.divisor() * kVector;
    first_channel = at.tile * width;
    channels = min(width, shape.C - first_channel);
    first_group = shape.D.quotient(first_channel);
    groups = shape.D.quotient(first_channel + channels) - first_group;
    parts_of_block = tiling.parts_per_segment();
    parts = tiling.splits.divisor() * parts_of_block;
  }
};

// The exchange of an item. A cluster's slots are those of the item, the chip's
// those of all items.
template <
    bool kWholeChip,
    bool kAllSamples = false,
    typename Value,
    int kVector>
__device__ __forceinline__ Exchange<kWholeChip, Value> exchange_of(
    const Shape& shape,
    const Tiling& tiling,
    const ResidentLayout& layout,
    const Waves& waves,
    const Position& at,
    const Item<kVector>& item,
    unsigned char* shared,
    Value* of_chip) {
  if constexpr (kWholeChip) {
    return {of_chip + (at.n * shape.G + item.first_group) * item.parts};
  } else {
    const int splits = tiling.splits.divisor();
    return {
        kAllSamples ? waves.cluster.divisor() : splits,
        kAllSamples ? static_cast<int>(at.n) * splits : 0,
        splits,
        reinterpret_cast<Value*>(shared + layout.slots),
        reinterpret_cast<uint64_t*>(shared + layout.barrier)};
  }
}

// While blocks exchange and store, little is read from DRAM. A block that is to
// start then finds part of its input in the L2 cache: earlier ones ask for it.

// For one thread of a block: asks for `pixels` pixels of the split at `at`,
// from its `first` on, of each operand. Of these, which lie together, the
// blocks of the split's tiles ask for a run each.
template <typename... Operands>
__device__ __forceinline__ void prefetch_pixels(
    const Shape& shape,
    const Tiling& tiling,
    const Position& at,
    int first,
    int pixels,
    const Operands*... operands) {
  const int last = min(first + pixels, at.pixels);
  const int run = tiling.column_tiles.quotient(pixels - 1) + 1;
  const int from = first + at.tile * run;
  const int to = min(from + run, last);
  if (from < to) {
    const int64_t pixel = at.n * shape.HxW + at.first_pixel;
    const int64_t begin = (pixel + from) * shape.C;
    const int64_t end = (pixel + to) * shape.C;
    (prefetch(operands + begin, operands + end), ...);
  }
}

// Asks for all that the block `waves.blocks_ahead` blocks later reads.
template <bool kAllSamples = false, typename... Operands>
__device__ __forceinline__ void prefetch_of_later_block(
    const Shape& shape,
    const Tiling& tiling,
    const Waves& waves,
    const Operands*... operands) {
  const unsigned block = blockIdx.x + waves.blocks_ahead;
  if (waves.blocks_ahead > 0 && threadIdx.x == 0 && block < gridDim.x) {
    const auto at = position_in_cluster_order<kAllSamples>(
        shape, tiling, waves, 1, static_cast<int>(block));
    prefetch_pixels(shape, tiling, at, 0, at.pixels, operands...);
  }
}

// Asks for the first that this block reads in its next wave, after the `copied`
// pixels of a thread whose copies start before that.
template <typename... Operands>
__device__ __forceinline__ void prefetch_of_next_wave(
    const Shape& shape,
    const Tiling& tiling,
    const Waves& waves,
    Position at,
    int copied,
    const Operands*... operands) {
  at.n += waves.samples.divisor();
  if (waves.pixels_ahead > 0 && threadIdx.x == 0 && at.n < shape.N) {
    const int rows = tiling.rows.divisor();
    prefetch_pixels(
        shape,
        tiling,
        at,
        copied * rows,
        waves.pixels_ahead * rows,
        operands...);
  }
}

} // namespace gn_override
