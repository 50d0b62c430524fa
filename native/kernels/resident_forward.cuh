// The forward kernel of clusters and of the whole chip (resident.cuh).
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/moments.cuh"
#include "native/kernels/resident.cuh"

namespace gn_override {

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

} // namespace gn_override
