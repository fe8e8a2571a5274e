// SPDX-License-Identifier: Apache-2.0
//
// What no kernel meets: f32 of any bits stored in 16, and where a NaN goes.
#ifdef __aarch64__
#include "cpu/vectors/neon.h"
#include "tests/arm/check.h"

namespace jax_layout {
namespace {

template <class T>
void CheckStores(DType type) {
  Random random;
  for (int i = 0; i < 100000; ++i) {
    // Half of them NaNs and infinities.
    const uint32_t special = i % 2 == 0 ? 0x7f800000 : 0;
    const uint32_t bits =
        static_cast<uint32_t>(random.Below(int64_t{1} << 32)) | special;
    const int n = 1 + i % NeonFloats::kLanes;
    T got[NeonFloats::kLanes] = {};
    NeonFloats::Store(got, NeonFloats::Set(FloatOfBits(bits)), n);
    for (int k = 0; k < NeonFloats::kLanes; ++k) {
      const double want =
          k < n ? Rounded(type, static_cast<double>(FloatOfBits(bits))) : 0;
      Expect(Close(Get(type, got, k), want, 0),
             [&] { return Text("stores", Name(type), bits, n, k); });
    }
  }
}

}  // namespace

void CheckVectors() {
  CheckStores<BF16>(DType::kBF16);
  CheckStores<F16>(DType::kF16);
  using V = NeonFloats;
  const V::Reg nan = V::Set(NAN), one = V::Set(1);
  Expect(std::isnan(V::Sum(V::Max(one, nan))), [] { return Text("max"); });
  Expect(std::isnan(V::Sum(V::Min(one, nan))), [] { return Text("min"); });
  Expect(V::Sum(V::Max(nan, one)) == 4, [] { return Text("max"); });
  Expect(V::Sum(V::Min(nan, one)) == 4, [] { return Text("min"); });
  Expect(V::Sum(V::WherePositive(nan, one)) == 0, [] { return Text("where"); });
}

}  // namespace jax_layout
#endif  // __aarch64__
