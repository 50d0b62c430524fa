// Division of 31-bit integers by a number that the host knows: a multiplication
// and a shift (Granlund and Montgomery, Division by Invariant Integers using
// Multiplication, 1994).
#pragma once

#include <bit>
#include <cstdint>

namespace gn_override {

class FastDivisor {
 public:
  FastDivisor() = default;

  // 1 <= divisor < 2^31
  explicit FastDivisor(int divisor)
      : divisor_(divisor),
        shift_(std::bit_width(static_cast<uint32_t>(divisor) - 1)) {
    const uint64_t power = uint64_t{1} << shift_;
    multiplier_ = static_cast<uint32_t>(
        ((power - static_cast<uint32_t>(divisor)) << 32) /
            static_cast<uint32_t>(divisor) +
        1);
  }

  // 0 <= n < 2^31
  __device__ __forceinline__ int quotient(int n) const {
    return static_cast<int>(
        (__umulhi(static_cast<uint32_t>(n), multiplier_) +
         static_cast<uint32_t>(n)) >>
        shift_);
  }

  __device__ __forceinline__ int divisor() const {
    return divisor_;
  }

 private:
  int divisor_;
  uint32_t multiplier_;
  uint32_t shift_;
};

} // namespace gn_override
