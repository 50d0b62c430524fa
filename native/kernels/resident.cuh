// Group normalisation of [N, HxW, C] tensors that keeps X (and dY) on chip
// between statistics and normalisation.
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

#include "native/kernels/activation.cuh"
#include "native/kernels/exchange.cuh"
#include "native/kernels/gradients.cuh"
#include "native/kernels/moments.cuh"
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

// A parameter's place in shared memory: neighbouring columns read neighbouring
// places.
template <int kVector>
__device__ __forceinline__ int parameter_place(
    const Tiling& tiling,
    int channel) {
  return channel % kVector * tiling.columns.divisor() + channel / kVector;
}

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

// std::min, which without --expt-relaxed-constexpr is the host's alone.
template <int a, int b>
constexpr int kSmaller = a < b ? a : b;

// -- forward -----------------------------------------------------------------

// per_group is 1 / (HxW D). of_chip[n][g][split]: for the exchange of the whole
// chip.
// kFused: with an activation.
template <typename T, typename TY, int kVector, bool kWholeChip, bool kFused>
__global__ void __launch_bounds__(
    kMaxResidentThreads,
    resident_blocks(sizeof(T), kWholeChip))
    resident_forward_kernel(
        Shape shape,
        Tiling tiling,
        ResidentLayout layout,
        Waves waves,
        Accumulator<T> per_group,
        Accumulator<T> eps,
        const T* X,
        const T* added, // kFused alone
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta,
        Activation activation, // kFused alone
        Moments<Accumulator<T>>* of_chip,
        TY* Y,
        ParameterOut<TY> mean_out,
        ParameterOut<TY> rstd_out) {
  using Acc = Accumulator<T>;
  Position at =
      position_in_cluster_order(shape, tiling, waves, kVector, blockIdx.x);
  const Item<kVector> item(shape, tiling, at);

  unsigned char* const shared = dynamic_shared_memory();
  const Slab<T, kVector> slab(shared);
  const Slab<T, kVector> slab_added(shared + layout.added); // kFused alone
  auto* const total = reinterpret_cast<Moments<Acc>*>(shared + layout.total);
  auto* const parameters =
      reinterpret_cast<Pair<Acc>*>(shared + layout.parameters);
  auto exchange = exchange_of<kWholeChip>(
      shape, tiling, layout, waves, at, item, shared, of_chip);

  wait_for_previous_kernel();
  ParameterCopy<TY> gammas(gamma, 1, item.channels);
  ParameterCopy<TY> betas(beta, 0, item.channels);
  gammas.fetch(item.first_channel);
  betas.fetch(item.first_channel);

  constexpr int kPixels = kRingPixels<Direction::kForward>;
  Ring<kPixels, kRingAhead<kWholeChip>, !kWholeChip> ring(
      waves.places, pixels_of_thread(tiling, at));
  const int step = tiling.rows.divisor() * shape.C;
  int64_t offset = at.offset(shape);
  const Retention<kWholeChip> retention(
      ring.count, kPixels * kRingAhead<kWholeChip>, waves.cached);
  const auto copy_from = [&](int64_t from, bool second = false) {
    return [=, &slab](int first, int place, auto pixels) {
      const T* pixel = X + from + int64_t{first} * step;
      auto* to = slab.at(place);
#pragma unroll
      for (int i = 0; i < decltype(pixels)::value; ++i) {
        retention.copy(to, pixel, first, second);
        pixel += step;
        to += blockDim.x;
      }
    };
  };
  // Batches that are under way while the exchange is prepared. Float's kernels
  // have no registers for that; double's are left alone.
  constexpr int kEarly = sizeof(T) == 2 ? 1 : 0;
  ring.template begin<0, kEarly>(copy_from(offset));
  exchange.begin();
  ring.template begin<kEarly>(copy_from(offset));
  gammas.store([&](int c, Acc value) {
    parameters[parameter_place<kVector>(tiling, c)].first = value;
  });
  betas.store([&](int c, Acc value) {
    parameters[parameter_place<kVector>(tiling, c)].second = value;
  });

  exchange.ready(item.groups * item.parts);
  if constexpr (!kWholeChip) {
    prefetch_of_later_block(shape, tiling, waves, X);
  }
  const bool refined = sizeof(TY) > 2 ||
      (kFused ? tiling.pixels_per_split << tiling.merge_shift <
               kFewElements * tiling.rows.divisor()
              : mean_out.is_float);
  for (int wave = 1;; ++wave) {
    const bool exists = !kWholeChip || at.n < shape.N;
    ChannelMoments<T, TY, kVector> moments;
    if constexpr (kFused) {
      if (added != nullptr && at.active && exists) {
        copy_async(slab_added.at(0), added + at.n * shape.C + at.channel);
      }
    }
    if (exists) {
      ring.read(copy_from(offset), [&](int, int place, auto pixels) {
        Vector<T, kVector> pixel[decltype(pixels)::value];
        slab.read(place, pixel);
        moments.add(pixel);
      });
      if constexpr (kWholeChip) {
        prefetch_of_next_wave(
            shape, tiling, waves, at, kPixels * kRingAhead<kWholeChip>, X);
      }
      if constexpr (kFused) {
        if (added != nullptr && at.active) {
          end_batch(); // there may be no pixels whose copies it is with
          wait_for_copies<0>();
          moments.move(*slab_added.at(0));
        }
      }
    }
    fold_segments(
        shape,
        tiling,
        at,
        moments,
        refined,
        reinterpret_cast<Pair<Acc>*>(shared + layout.fold),
        [&](int group, int part, const Moments<Acc>& moment, int lane) {
          if (exists) {
            exchange.put(
                (group - item.first_group) * item.parts +
                    at.split * item.parts_of_block + part,
                moment,
                lane,
                min(tiling.lanes_per_segment, kWarpSize));
          }
        });
    // Ahead of the wait, so that it hides them.
    Acc weight[kVector] = {};
    Acc bias[kVector] = {};
    if (at.active) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Pair<Acc> both =
            parameters[j * tiling.columns.divisor() + at.column];
        weight[j] = both.first;
        bias[j] = both.second;
      }
    }
    const Runs runs(tiling.lanes_per_exchange);
    exchange.wait();

    runs.deal(exists ? item.groups : 0, [&](int g, int lane, bool valid) {
      Moments<Acc> of_group = merge_moments<TY, kHeldParts<kWholeChip>, Acc>(
          lane,
          runs.lanes,
          item.parts,
          [&](int i) { return exchange.slots[g * item.parts + i]; },
          [&] { return exchange.slots[g * item.parts].mean; },
          refined,
          [&](auto& sums) { sum_lanes(sums, runs.lanes); },
          &per_group);
      of_group.second = reciprocal_sqrt(of_group.second * per_group + eps);
      if (lane == 0 && valid) {
        total[g] = of_group;
        if (at.split == 0) {
          const int64_t index = at.n * shape.G + item.first_group + g;
          mean_out.set(index, of_group.mean);
          rstd_out.set(index, of_group.second);
        }
      }
    });
    __syncthreads();
    const int64_t next_offset = offset +
        waves.samples.divisor() * shape.HxW * static_cast<int64_t>(shape.C);
    const bool next_exists =
        kWholeChip && at.n + waves.samples.divisor() < shape.N;

    if (at.active && exists) {
      constexpr int kSharing = kWholeChip ? kNeighbours : 1; // kFused alone
      Normalization<T, TY, kVector, kFused, kSharing> normalization(
          shape, at.channel, activation, weight, bias, [&](int group) {
            return total[group - item.first_group];
          });
      if constexpr (kFused) {
        if (added != nullptr) {
          normalization.move(*slab_added.at(0));
        }
      }
      ring.write(
          next_exists,
          copy_from(offset, true),
          copy_from(next_offset),
          [&](int first, int place, auto pixels) {
            Vector<T, kVector> pixel[decltype(pixels)::value];
            slab.read(place, pixel);
            const int64_t from = offset + int64_t{first} * step;
            normalization.write(pixel, X + from, Y + from, step);
          });
    }
    if (!kWholeChip || wave == waves.count) {
      return;
    }
    at.n += waves.samples.divisor();
    offset = next_offset;
    ring.reversed = !ring.reversed;
    if constexpr (kWholeChip) {
      exchange.slots +=
          int64_t{1} * waves.samples.divisor() * shape.G * item.parts;
    }
  }
}

// -- backward ----------------------------------------------------------------

// How the blocks of a cluster that has all samples share the channels whose
// dgamma and dbeta they add up: channel c of the tile is that of block c modulo
// their number, which has a slot for what each of them found.
struct ClusterShare {
  FastDivisor blocks;
  int rank; // of this block
  int channels; // of this block
  int first_slot;

  __device__
  ClusterShare(FastDivisor blocks, int rank, int of_tile, int first_slot)
      : blocks(blocks),
        rank(rank),
        channels(of_tile > rank ? blocks.quotient(of_tile - rank - 1) + 1 : 0),
        first_slot(first_slot) {}

  // Values that the block will get.
  __device__ int values() const {
    return channels * blocks.divisor();
  }

  // Of this block's i-th channel, from a block.
  __device__ int slot(int i, int from) const {
    return first_slot + i * blocks.divisor() + from;
  }
};

// dgamma and dbeta of the channels of a share, whose tile starts at
// first_channel.
template <typename T>
__device__ __forceinline__ void sum_share(
    const ClusterShare& share,
    int first_channel,
    const Pair<Accumulator<T>>* slots,
    ParameterOut<T> dgamma,
    ParameterOut<T> dbeta) {
  for (int i = threadIdx.x; i < share.channels; i += blockDim.x) {
    auto ds = CompensatedSum<Accumulator<T>>::zero();
    auto db = CompensatedSum<Accumulator<T>>::zero();
    for (int block = 0; block < share.blocks.divisor(); ++block) {
      const Pair<Accumulator<T>> sum = slots[share.slot(i, block)];
      ds.add(sum.first);
      db.add(sum.second);
    }
    const int c = i * share.blocks.divisor() + share.rank;
    set_parameter_gradients(
        first_channel + c, ds.value(), db.value(), dgamma, dbeta);
  }
}

// dgamma and dbeta of all channels, of [rows, C] sums that all blocks wrote.
template <typename T>
__device__ __forceinline__ void sum_by_whole_chip(
    int C,
    int64_t rows,
    const Pair<Accumulator<T>>* sums,
    CompensatedSum<Accumulator<T>>* shared, // two of each thread
    ParameterOut<T> dgamma,
    ParameterOut<T> dbeta) {
  for (int first = blockIdx.x * kParameterChannels; first < C;
       first += gridDim.x * kParameterChannels) {
    __syncthreads(); // nobody reads `shared` any more
    sum_parameter_gradients<T>(
        C,
        rows,
        static_cast<int>(blockDim.x) / kParameterChannels,
        first,
        sums,
        shared,
        dgamma,
        dbeta);
  }
}

// dX unless it is null, and unless `sums` is null, sums[n][split][c] =
// (sum dZ xhat, sum dZ), from which a cluster leaves dgamma and dbeta to
// parameter_gradients. per_group and of_chip: as forward.
// kAllSamples: a cluster has all blocks of a tile, and adds these sums up
// itself.
template <
    typename T,
    typename TY,
    int kVector,
    bool kWholeChip,
    bool kAllSamples,
    bool kFused>
__global__ void __launch_bounds__(
    kMaxResidentThreads,
    resident_blocks(sizeof(T), kWholeChip))
    resident_backward_kernel(
        Shape shape,
        Tiling tiling,
        ResidentLayout layout,
        Waves waves,
        Accumulator<T> per_group,
        const TY* dY,
        const T* X,
        ParameterIn<TY> mean_in,
        ParameterIn<TY> rstd_in,
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta, // kFused alone
        Activation activation, // kFused alone
        Pair<Accumulator<T>>* of_chip,
        Pair<Accumulator<T>>* sums,
        T* dX,
        ParameterOut<TY> dgamma,
        ParameterOut<TY> dbeta) {
  using Acc = Accumulator<T>;
  static_assert(!kWholeChip || !kAllSamples);
  Position at = position_in_cluster_order<kAllSamples>(
      shape, tiling, waves, kVector, blockIdx.x);
  const Item<kVector> item(shape, tiling, at);

  unsigned char* const shared = dynamic_shared_memory();
  const Slab<TY, kVector> slab_dY(shared);
  const Slab<T, kVector> slab_X(shared + layout.slab_X);
  auto* const total = reinterpret_cast<Pair<Acc>*>(shared + layout.total);
  auto* const moments = reinterpret_cast<Pair<Acc>*>(shared + layout.moments);
  auto* const weights = reinterpret_cast<Acc*>(shared + layout.parameters);
  // What an activation needs. Maps have a place more than channels, so that
  // columns start at different banks.
  auto* const biases = weights + tiling.columns.divisor() * kVector;
  auto* const maps = reinterpret_cast<Pair<Acc>*>(shared + layout.maps);
  const auto* const own_maps = maps + at.column * (kVector + 1);
  auto* const channels = reinterpret_cast<Pair<Acc>*>(shared + layout.channels);
  auto exchange = exchange_of<kWholeChip, kAllSamples>(
      shape, tiling, layout, waves, at, item, shared, of_chip);
  const ClusterShare share( // kAllSamples alone
      waves.cluster,
      static_cast<int>(at.n) * tiling.splits.divisor() + at.split,
      kAllSamples ? item.channels : 0,
      item.groups * item.parts);

  exchange.begin(); // later, it would cost registers
  wait_for_previous_kernel();
  ParameterCopy<TY> gammas(gamma, 1, item.channels);
  ParameterCopy<TY> means(mean_in, 0, item.groups);
  ParameterCopy<TY> rstds(rstd_in, 1, item.groups);
  gammas.fetch(item.first_channel);
  ParameterCopy<TY> betas(beta, 0, item.channels); // kFused alone
  if constexpr (kFused) {
    betas.fetch(item.first_channel);
  }
  means.fetch(at.n * shape.G + item.first_group);
  rstds.fetch(at.n * shape.G + item.first_group);

  constexpr int kPixels = kRingPixels<Direction::kBackward>;
  // Where a pixel stays in place, dZ takes dY's place in the slab: rounded to
  // dY's type, as PyTorch's gradient of an activation is. What is copied again
  // needs the derivative again.
  constexpr bool kDifferentiatesAgain = kFused && kWholeChip;
  // Pixels in registers at once while there are derivatives: a cluster's
  // kernels, and double's, have no room for more.
  constexpr int kAtOnce =
      kFused && (!kWholeChip || sizeof(T) == 8) ? 1 : kPixels;
  Ring<kPixels, kRingAhead<kWholeChip>, !kWholeChip> ring(
      waves.places, pixels_of_thread(tiling, at));
  const int step = tiling.rows.divisor() * shape.C;
  int64_t offset = at.offset(shape);
  const Retention<kWholeChip> retention(
      ring.count, kPixels * kRingAhead<kWholeChip>, waves.cached);
  const auto copy_from = [&](int64_t from, bool second = false) {
    return [=, &slab_dY, &slab_X](int first, int place, auto pixels) {
      const TY* dy = dY + from + int64_t{first} * step;
      const T* x = X + from + int64_t{first} * step;
      auto* to_dY = slab_dY.at(place);
      auto* to_X = slab_X.at(place);
#pragma unroll
      for (int i = 0; i < decltype(pixels)::value; ++i) {
        retention.copy(to_dY, dy, first, second);
        retention.copy(to_X, x, first, second);
        dy += step;
        x += step;
        to_dY += blockDim.x;
        to_X += blockDim.x;
      }
    };
  };
  ring.begin(copy_from(offset));
  gammas.store([&](int c, Acc value) {
    weights[parameter_place<kVector>(tiling, c)] = value;
  });
  if constexpr (kFused) {
    betas.store([&](int c, Acc value) {
      biases[parameter_place<kVector>(tiling, c)] = value;
    });
  }

  exchange.ready(item.groups * item.parts + (kAllSamples ? share.values() : 0));
  if constexpr (!kWholeChip) {
    prefetch_of_later_block<kAllSamples>(shape, tiling, waves, dY, X);
  }

  for (int wave = 1;; ++wave) {
    const bool exists = !kWholeChip || at.n < shape.N;
    means.store([&](int g, Acc value) { moments[g].first = value; });
    rstds.store([&](int g, Acc value) { moments[g].second = value; });
    __syncthreads();
    const auto moments_of = [&](int group) {
      return moments[group - item.first_group];
    };
    if constexpr (kFused) {
      const int count = exists ? item.channels : 0;
      for (int c = threadIdx.x; c < count; c += blockDim.x) {
        const Pair<Acc> moment =
            moments_of(shape.D.quotient(item.first_channel + c));
        const int place = parameter_place<kVector>(tiling, c);
        maps[c / kVector * (kVector + 1) + c % kVector] = channel_map<TY>(
            moment.first, moment.second, weights[place], biases[place]);
      }
      __syncthreads();
    }
    // The maps stay in shared memory: there are no registers left for them.
    const auto map_of = [&](int j) { return own_maps[j]; };
    const auto differentiation =
        differentiation_of<kFused, TY>(activation, map_of);

    Pair<Acc> of_thread[kVector] = {};
    if (at.active && exists) {
      GradientSums<T, TY, kVector> gradients;
      Acc mean[kVector];
      Acc rstd[kVector];
      read_moments(shape, at.channel, moments_of, mean, rstd);
      ring.read(copy_from(offset), [&](int first, int place, auto pixels) {
        const bool stays = ring.stays(first);
        for_each_run_of_pixels<kSmaller<decltype(pixels)::value, kAtOnce>>(
            decltype(pixels)::value, [&](int i, auto at_once) {
              Vector<TY, kVector> dy[decltype(at_once)::value];
              Vector<T, kVector> x[decltype(at_once)::value];
              slab_dY.read(place + i, dy);
              slab_X.read(place + i, x);
              differentiation.with([&](auto dZ_of) {
                Acc dZ[decltype(at_once)::value][kVector];
                gradients.add(dy, x, mean, dZ_of, dZ);
                if constexpr (kFused) {
                  if (stays) {
#pragma unroll
                    for (int k = 0; k < decltype(at_once)::value; ++k) {
                      *slab_dY.at(place + i + k) =
                          narrow_all<TY, kVector>(dZ[k]);
                    }
                  }
                }
              });
            });
      });
      gradients.finish(rstd, of_thread);
      if constexpr (kWholeChip) {
        prefetch_of_next_wave(
            shape, tiling, waves, at, kPixels * kRingAhead<kWholeChip>, dY, X);
      }
    }
    fold_rows<TY>(
        tiling.columns,
        tiling.rows.divisor(),
        threadIdx.x,
        tiling.lanes_per_channel,
        of_thread,
        reinterpret_cast<Pair<Acc>*>(shared + layout.fold),
        [&](int c, Pair<Acc> sum) {
          if (c < item.channels && exists) {
            const Acc weight = weights[parameter_place<kVector>(tiling, c)];
            channels[c] = {weight * sum.first, weight * sum.second};
            if (sums != nullptr) {
              const int64_t row = at.n * tiling.splits.divisor() + at.split;
              sums[row * shape.C + item.first_channel + c] = sum;
            }
            if constexpr (kAllSamples) {
              const int i = share.blocks.quotient(c);
              const int to = c - i * share.blocks.divisor();
              exchange.give(to, share.slot(i, share.rank), sum);
            }
          }
        });
    const int D = shape.D.divisor();
    const Runs segments(tiling.lanes_per_segment);
    __syncthreads();

    segments.deal(exists ? item.groups : 0, [&](int g, int lane, bool valid) {
      Acc sum[2] = {0, 0};
      for (int i = lane; i < D; i += segments.lanes) {
        const Pair<Acc> channel = channels[g * D + i];
        sum[0] += channel.first;
        sum[1] += channel.second;
      }
      sum_lanes(sum, segments.lanes);
      if (valid) {
        exchange.put(
            g * item.parts + at.split * item.parts_of_block + lane / kWarpSize,
            {sum[0], sum[1]},
            lane % kWarpSize,
            min(segments.lanes, kWarpSize));
      }
    });
    // Ahead of the wait, so that it hides them.
    Acc weight[kVector] = {};
    if (at.active) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        weight[j] = weights[j * tiling.columns.divisor() + at.column];
      }
    }
    const Runs runs(tiling.lanes_per_exchange);
    exchange.wait();

    runs.deal(exists ? item.groups : 0, [&](int g, int lane, bool valid) {
      Acc sum[2] = {0, 0}; // of gamma dZ xhat, gamma dZ
#pragma unroll(kHeldParts<kWholeChip>)
      for (int i = lane; i < item.parts; i += runs.lanes) {
        const Pair<Acc> part = exchange.slots[g * item.parts + i];
        sum[0] += part.first;
        sum[1] += part.second;
      }
      sum_lanes(sum, runs.lanes);
      if (lane == 0 && valid) {
        total[g] = {sum[0] * per_group, sum[1] * per_group};
      }
    });
    __syncthreads();
    const int64_t next_offset = offset +
        waves.samples.divisor() * shape.HxW * static_cast<int64_t>(shape.C);
    const bool next_exists =
        kWholeChip && at.n + waves.samples.divisor() < shape.N;
    if (next_exists) {
      const int64_t index =
          (at.n + waves.samples.divisor()) * shape.G + item.first_group;
      means.fetch(index);
      rstds.fetch(index);
    }

    if (at.active && exists) {
      const InputGradient<T, TY, kVector> gradient(
          shape, at.channel, weight, moments_of, [&](int group) {
            return total[group - item.first_group];
          });
      ring.write(
          next_exists,
          copy_from(offset, true),
          copy_from(next_offset),
          [&](int first, int place, auto pixels) {
            if (dX == nullptr) {
              return;
            }
            const auto write = [&](auto most_at_once, const auto& dZ_of_dY) {
              for_each_run_of_pixels<kSmaller<
                  decltype(pixels)::value,
                  decltype(most_at_once)::value>>(
                  decltype(pixels)::value, [&](int i, auto at_once) {
                    Vector<TY, kVector> dy[decltype(at_once)::value];
                    Vector<T, kVector> x[decltype(at_once)::value];
                    slab_dY.read(place + i, dy);
                    slab_X.read(place + i, x);
                    T* out = dX + offset + int64_t{first + i} * step;
#pragma unroll
                    for (int k = 0; k < decltype(at_once)::value; ++k) {
                      Vector<T, kVector> dx;
                      dZ_of_dY.with([&](auto dZ_of) {
                        dx = gradient(dy[k], x[k], dZ_of);
                      });
                      store(out, dx);
                      out += step;
                    }
                  });
            };
            if constexpr (kDifferentiatesAgain) {
              if (!ring.stays(first)) {
                return write(Pixels<kAtOnce>(), differentiation);
              }
            }
            write(Pixels<kPixels>(), NoDifferentiation());
          });
    }
    if (!kWholeChip || wave == waves.count) {
      break;
    }
    at.n += waves.samples.divisor();
    offset = next_offset;
    ring.reversed = !ring.reversed;
    if constexpr (kWholeChip) {
      exchange.slots +=
          int64_t{1} * waves.samples.divisor() * shape.G * item.parts;
      __syncthreads(); // the moments of this wave have been read
    }
  }

  if constexpr (kAllSamples) {
    sum_share(share, item.first_channel, exchange.slots, dgamma, dbeta);
  }
  // All blocks' sums are in global memory since they met for the last time.
  // Those of threads take the slab's place, in which each has a ring at least.
  static_assert(
      kRingAhead<true> * kPixels * kVector * (sizeof(T) + sizeof(TY)) >=
      2 * sizeof(CompensatedSum<Acc>));
  if (kWholeChip && sums != nullptr) {
    sum_by_whole_chip(
        shape.C,
        shape.N * tiling.splits.divisor(),
        sums,
        reinterpret_cast<CompensatedSum<Acc>*>(shared),
        dgamma,
        dbeta);
  }
}

} // namespace gn_override
