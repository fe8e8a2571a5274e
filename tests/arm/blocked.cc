// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/blocked/blocked.h"

#include "tests/arm/check.h"
#include "tests/arm/product.h"

namespace jax_layout {
namespace {

Random random;

constexpr ProductMethod kBlocked = {BlockedSupports, GemmBlocked};

void CheckSizes(Product c, int64_t m, int64_t n, int64_t k) {
  c.sizes.clear();
  for (char axis : c.a + c.b) {
    c.sizes[axis] = axis == 'm' ? m : axis == 'n' ? n : axis == 'k' ? k : 3;
  }
  CheckProduct(kBlocked, c, &random);
}

}  // namespace

void CheckBlocked() {
  const Product all[] = {{"mk", "kn", "mn", {}},    {"mk", "nk", "mn", {}},
                         {"km", "kn", "mn", {}},    {"km", "nk", "mn", {}},
                         {"bmk", "bkn", "bmn", {}}, {"mbk", "nbk", "bmn", {}}};
  for (Product c : all) {
    for (DType type : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (DType result : {type, DType::kF32}) {
        c.type = type;
        c.result = result;
        for (int64_t m : {1, 5, 8, 33}) {
          for (int64_t n : {1, 8, 13, 50}) {
            for (int64_t k : {1, 4, 19}) {
              c.alpha = random.Of({1., 2., 0.});
              c.beta = random.Of({0., -1.});
              c.bias = c.a.size() == 2 && random.Flip();
              c.activation = random.Of({"none", "relu", "gelu"});
              c.derivative = c.activation == "none"
                                 ? random.Of({"none", "relu", "gelu"})
                                 : "none";
              c.aux = c.derivative == "none" && random.Flip();
              CheckSizes(c, m, n, k);
            }
          }
        }
        // Past a block of k.
        c.alpha = 1;
        c.beta = 0;
        c.activation = c.derivative = "none";
        c.bias = c.aux = false;
        if (c.a.size() == 2) CheckSizes(c, 20, 30, 600);
      }
    }
  }
}

}  // namespace jax_layout
