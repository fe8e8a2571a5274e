// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/skinny/skinny.h"

#include "tests/arm/check.h"
#include "tests/arm/product.h"

namespace jax_layout {
namespace {

Random random;

constexpr ProductMethod kSkinny = {SkinnySupports, GemmSkinny};
constexpr ProductMethod kUnpacked = {UnpackedSupports, GemmSkinny};

}  // namespace

void CheckSkinny() {
  const Product all[] = {{"mk", "kn", "mn", {}},
                         {"mk", "nk", "mn", {}},
                         {"km", "kn", "mn", {}},
                         {"nk", "km", "nm", {}},
                         {"bmk", "bnk", "bmn", {}}};
  for (Product c : all) {
    for (DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kS8}) {
      c.type = type;
      c.result = type == DType::kS8             ? DType::kS32
                 : c.b == "kn" && random.Flip() ? DType::kF32
                                                : type;
      if (c.b == "kn" && type != DType::kS8) {
        c.sizes = {{'m', 70}, {'k', 37}, {'n', 131}};
        CheckProduct(kUnpacked, c, &random);
      }
      for (int64_t m : {2, 3, 5, 8, 13, 33, 64}) {
        for (int64_t k : {1, 2, 3, 8, 31, 97, 600}) {
          for (int64_t n : {1, 3, 8, 33, 131}) {
            if (m * k * n > 20000 && (m != 13 || n != 33)) continue;
            c.sizes = {{'m', m}, {'k', k}, {'n', n}};
            if (c.a[0] == 'b') c.sizes['b'] = 2;
            c.alpha = random.Of({1., 2., 0.});
            c.beta = random.Of({0., -1.});
            c.bias = c.y == "mn" && random.Flip();
            const bool plain = type == DType::kS8 || random.Flip();
            c.activation = plain ? "none" : random.Of({"relu", "gelu"});
            c.derivative = plain && type != DType::kS8
                               ? random.Of({"none", "relu", "gelu"})
                               : "none";
            c.aux = c.derivative == "none" && random.Flip();
            CheckProduct(kSkinny, c, &random);
          }
        }
      }
    }
  }
}

}  // namespace jax_layout
