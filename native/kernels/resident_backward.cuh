// The backward kernel of clusters and of the whole chip (resident.cuh).
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/gradients.cuh"
#include "native/kernels/resident.cuh"

namespace gn_override {

// std::min, which without --expt-relaxed-constexpr is the host's alone.
template <int a, int b>
constexpr int kSmaller = a < b ? a : b;

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

// The maps of the block's first `count` channels. A column has a place more
// than channels, so that columns start at different banks.
template <typename TY, int kVector, typename Acc, typename MomentsOf>
__device__ __forceinline__ void make_maps(
    const Shape& shape,
    const Tiling& tiling,
    const Item<kVector>& item,
    int count,
    MomentsOf moments_of,
    const Acc* weights,
    const Acc* biases,
    Pair<Acc>* maps) {
  for (int c = threadIdx.x; c < count; c += blockDim.x) {
    const Pair<Acc> moment =
        moments_of(shape.D.quotient(item.first_channel + c));
    const int place = parameter_place<kVector>(tiling, c);
    maps[c / kVector * (kVector + 1) + c % kVector] = channel_map<TY>(
        moment.first, moment.second, weights[place], biases[place]);
  }
}

// Gives the exchange what this split has of each of the first `groups` groups:
// the sums over its D channels, a part by each warp of the run that takes it.
template <int kVector, typename Acc, typename Exchange>
__device__ __forceinline__ void put_parts(
    const Runs& runs,
    int groups,
    const Item<kVector>& item,
    int split,
    int D,
    const Pair<Acc>* channels,
    Exchange& exchange) {
  runs.deal(groups, [&](int g, int lane, bool valid) {
    Acc sum[2] = {0, 0};
    for (int i = lane; i < D; i += runs.lanes) {
      const Pair<Acc> channel = channels[g * D + i];
      sum[0] += channel.first;
      sum[1] += channel.second;
    }
    sum_lanes(sum, runs.lanes);
    if (valid) {
      exchange.put(
          g * item.parts + split * item.parts_of_block + lane / kWarpSize,
          {sum[0], sum[1]},
          lane % kWarpSize,
          min(runs.lanes, kWarpSize));
    }
  });
}

// total[g] = per_group * (sum gamma dZ xhat, sum gamma dZ) of the first
// `groups` groups, from the parts of all splits.
template <int kHeld, typename Acc>
__device__ __forceinline__ void sum_parts(
    const Runs& runs,
    int groups,
    int parts,
    const Pair<Acc>* slots,
    Acc per_group,
    Pair<Acc>* total) {
  runs.deal(groups, [&](int g, int lane, bool valid) {
    Acc sum[2] = {0, 0};
#pragma unroll(kHeld)
    for (int i = lane; i < parts; i += runs.lanes) {
      const Pair<Acc> part = slots[g * parts + i];
      sum[0] += part.first;
      sum[1] += part.second;
    }
    sum_lanes(sum, runs.lanes);
    if (lane == 0 && valid) {
      total[g] = {sum[0] * per_group, sum[1] * per_group};
    }
  });
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
  // What an activation needs.
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
      make_maps<TY>(
          shape,
          tiling,
          item,
          exists ? item.channels : 0,
          moments_of,
          weights,
          biases,
          maps);
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
    const Runs segments(tiling.lanes_per_segment);
    __syncthreads();

    put_parts(
        segments,
        exists ? item.groups : 0,
        item,
        at.split,
        shape.D.divisor(),
        channels,
        exchange);
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

    sum_parts<kHeldParts<kWholeChip>>(
        runs,
        exists ? item.groups : 0,
        item.parts,
        exchange.slots,
        per_group,
        total);
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
          shape, at.channel, weight, [&](int group) {
            return gradient_of_group<T>(
                moments_of(group), total[group - item.first_group]);
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
