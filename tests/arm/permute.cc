// SPDX-License-Identifier: Apache-2.0
#include "cpu/permute/permute.h"

#include <algorithm>
#include <numeric>

#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

// y in the order of its elements, each found in x.
void Check(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes,
           int64_t itemsize, int threads = 2) {
  const size_t rank = shape.size();
  const int64_t size =
      std::accumulate(shape.begin(), shape.end(), itemsize, std::multiplies());
  const Memory x(size), y(size);
  for (int64_t i = 0; i < size; ++i) x.data()[i] = random.Below(256);
  std::vector<int64_t> stride(rank, itemsize), at(rank);
  for (size_t d = rank; d-- > 1;) stride[d - 1] = stride[d] * shape[d];
  std::vector<char> want(size);
  int64_t from = 0;
  for (int64_t i = 0; i < size; i += itemsize) {
    std::memcpy(want.data() + i, x.data() + from, itemsize);
    y.data()[i] = ~want[i];
    for (size_t d = rank; d-- > 0;) {
      from += stride[axes[d]];
      if (++at[d] < shape[axes[d]]) break;
      from -= at[d] * stride[axes[d]];
      at[d] = 0;
    }
  }
  PermutePlan plan;
  bool ok = MakePermutePlan(shape, axes, itemsize, &plan).ok();
  ok = ok &&
       Permute(ChoosePermuteKernel(plan), x.data(), y.data(), Threads(threads))
           .ok();
  ok = ok && std::memcmp(y.data(), want.data(), size) == 0 && y.Intact();
  Expect(ok, [&] {
    std::string text = Text("permute itemsize", itemsize, "shape");
    for (int64_t n : shape) text += Text(n);
    text += "axes ";
    for (int64_t a : axes) text += Text(a);
    return text;
  });
}

}  // namespace

void CheckPermute() {
  for (int64_t itemsize : {1, 2, 4, 8, 16}) {
    for (int64_t m : {1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 65, 97}) {
      for (int64_t n : {1, 2, 3, 5, 8, 15, 16, 17, 32, 33, 63, 65, 128}) {
        Check({m, n}, {1, 0}, itemsize);
      }
    }
    for (const std::vector<int64_t>& shape :
         {std::vector<int64_t>{5, 3, 17, 33}, {2, 65, 4, 7}, {16, 16, 8, 16}}) {
      std::vector<int64_t> axes = {0, 1, 2, 3};
      do {
        Check(shape, axes, itemsize);
      } while (std::next_permutation(axes.begin(), axes.end()));
    }
    // Pixels and planes: byte shuffles.
    for (int64_t channels : {2, 3, 4, 5, 7, 13}) {
      for (int64_t pixels : {1, 3, 31, 64, 1000, 4097}) {
        Check({2, pixels, channels}, {0, 2, 1}, itemsize);
        Check({2, channels, pixels}, {0, 2, 1}, itemsize);
      }
    }
  }
  for (int64_t chunk :
       {3, 5, 6, 7, 9, 12, 15, 17, 24, 31, 48, 63, 65, 100, 999, 70000}) {
    Check({2, 3, chunk}, {1, 0, 2}, 1);
    if (chunk < 1000) Check({17, 35, chunk}, {1, 0, 2}, 1);
  }
  for (int i = 0; i < 200; ++i) {
    std::vector<int64_t> shape(random.Between(1, 7));
    int64_t size = 1;
    for (int64_t& n : shape) {
      n = std::min<int64_t>(random.Between(1, 20), 1 + 40000 / size);
      size *= n;
    }
    std::vector<int64_t> axes(shape.size());
    std::iota(axes.begin(), axes.end(), 0);
    for (size_t d = axes.size(); d > 1; --d) {
      std::swap(axes[d - 1], axes[random.Below(d)]);
    }
    Check(shape, axes, random.Of<int64_t>({1, 2, 4, 8, 16}),
          static_cast<int>(random.Between(1, 4)));
  }
  // Past the size of non-temporal stores, where there are any.
  Check({2039, 1601}, {1, 0}, 4, 3);
  Check({2100, 2000, 3}, {2, 0, 1}, 1, 3);
}

}  // namespace jax_layout
