// SPDX-License-Identifier: Apache-2.0
#include "cpu/index/index.h"

#include <algorithm>
#include <cstdlib>

#include "tests/arm/check.h"

namespace jax_layout {
namespace {

Random random;

std::string Describe(const char* name, const IndexPlan& p) {
  return Text(name, p.batch, p.outer, p.extent, p.count, p.inner, "itemsize",
              p.itemsize, "wide", p.wide, "clip", p.clip, "wrap", p.wrap);
}

IndexPlan AnyPlan(int64_t itemsize) {
  IndexPlan p;
  p.batch = random.Between(1, 3);
  p.outer = random.Of<int64_t>({1, 2, 5});
  p.extent = random.Between(1, 40);
  p.count = random.Of<int64_t>({1, 3, 17, 100});
  p.inner = random.Of<int64_t>({1, 2, 3, 5, 8, 17, 64, 331});
  p.itemsize = itemsize;
  p.wide = random.Flip();
  p.clip = random.Flip();
  p.wrap = random.Flip();
  return p;
}

// Few rows, each of many.
IndexPlan PlanInParts(int64_t itemsize) {
  IndexPlan p = AnyPlan(itemsize);
  p.batch = random.Between(1, 2);
  p.outer = random.Between(1, 2);
  p.extent = random.Between(1, 5);
  p.count = random.Between(500, 1500);
  p.inner = random.Of<int64_t>({1, 33, 331});
  return p;
}

// Indices of which some are negative, and some name nothing.
std::vector<int64_t> AnyIndices(const IndexPlan& p, const Memory& memory) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < p.batch * p.count; ++i) {
    const int64_t at = random.Between(-p.extent - 1, p.extent);
    if (p.wide) {
      reinterpret_cast<int64_t*>(memory.data())[i] = at;
    } else {
      reinterpret_cast<int32_t*>(memory.data())[i] = static_cast<int32_t>(at);
    }
    const int64_t row = at < 0 && p.wrap ? at + p.extent : at;
    const bool named = row >= 0 && row < p.extent;
    rows.push_back(named ? row : p.clip ? (row < 0 ? 0 : p.extent - 1) : -1);
  }
  return rows;
}

void CheckSelect(const IndexPlan& p) {
  const int64_t row = p.inner_bytes();
  const Memory x(p.batch * p.outer * p.extent * row);
  const Memory y(p.batch * p.outer * p.count * row);
  const Memory index(p.batch * p.count * (p.wide ? 8 : 4));
  const std::vector<int64_t> rows = AnyIndices(p, index);
  uint8_t fill[16];
  for (uint8_t& byte : fill) byte = static_cast<uint8_t>(random.Below(256));
  for (int64_t i = 0; i < x.bytes(); ++i) x.data()[i] = random.Below(256);
  bool ok =
      IndexSelect(p, x.data(), index.data(), fill, y.data(), Threads(2)).ok() &&
      y.Intact();
  for (int64_t i = 0; i < p.batch * p.outer * p.count; ++i) {
    const int64_t slice = i / p.count, batch = slice / p.outer;
    const int64_t from = rows[batch * p.count + i % p.count];
    for (int64_t k = 0; k < row; ++k) {
      const char want = from < 0
                            ? static_cast<char>(fill[k % p.itemsize])
                            : x.data()[(slice * p.extent + from) * row + k];
      ok = ok && y.data()[i * row + k] == want;
    }
  }
  Expect(ok, [&] { return Describe("index_select", p); });
}

// Infinity is beyond what is checked.
int64_t Whole(double x) {
  return static_cast<int64_t>(std::clamp(x, -1e6, 1e6));
}

int64_t ElementOf(SumType type, const void* x, int64_t i) {
  switch (type) {
    case SumType::kF32:
      return Whole(Get(DType::kF32, x, i));
    case SumType::kF64:
      return Whole(Get(DType::kF64, x, i));
    case SumType::kBF16:
      return Whole(Get(DType::kBF16, x, i));
    case SumType::kF16:
      return Whole(Get(DType::kF16, x, i));
    case SumType::kI8:
      return static_cast<const int8_t*>(x)[i];
    case SumType::kI16:
      return static_cast<const int16_t*>(x)[i];
    case SumType::kI32:
      return static_cast<const int32_t*>(x)[i];
    default:
      return static_cast<const int64_t*>(x)[i];
  }
}

void PutElement(SumType type, void* x, int64_t i, int64_t value) {
  switch (type) {
    case SumType::kF32:
      return Set(DType::kF32, x, i, static_cast<double>(value));
    case SumType::kF64:
      return Set(DType::kF64, x, i, static_cast<double>(value));
    case SumType::kBF16:
      return Set(DType::kBF16, x, i, static_cast<double>(value));
    case SumType::kF16:
      return Set(DType::kF16, x, i, static_cast<double>(value));
    case SumType::kI8:
      static_cast<int8_t*>(x)[i] = static_cast<int8_t>(value);
      return;
    case SumType::kI16:
      static_cast<int16_t*>(x)[i] = static_cast<int16_t>(value);
      return;
    case SumType::kI32:
      static_cast<int32_t*>(x)[i] = static_cast<int32_t>(value);
      return;
    default:
      static_cast<int64_t*>(x)[i] = value;
  }
}

enum class From { kArray, kItself, kNothing };

int64_t Reduced(Reduction reduction, int64_t a, int64_t b) {
  return reduction == Reduction::kSum   ? a + b
         : reduction == Reduction::kMax ? std::max(a, b)
                                        : std::min(a, b);
}

void CheckReduce(const IndexPlan& p, Reduction reduction, SumType type,
                 From from) {
  const int64_t size = p.batch * p.outer * p.extent * p.inner;
  const int64_t added = p.batch * p.outer * p.count * p.inner;
  const Memory x(size * p.itemsize), y(size * p.itemsize);
  const Memory source(added * p.itemsize);
  const Memory index(p.batch * p.count * (p.wide ? 8 : 4));
  const std::vector<int64_t> rows = AnyIndices(p, index);
  std::vector<int64_t> want(size);
  // Of a maximum, rows that nothing goes to hold what the type holds least.
  const int64_t kNothing = reduction == Reduction::kSum   ? 0
                           : reduction == Reduction::kMax ? -1000
                                                          : 1000;
  for (int64_t i = 0; i < size; ++i) {
    want[i] = random.Between(-3, 3);
    PutElement(type, x.data(), i, want[i]);
    PutElement(type, y.data(), i, want[i]);
    if (from == From::kNothing) want[i] = kNothing;
  }
  for (int64_t i = 0; i < added; ++i) {
    // Sums that eight bits hold.
    const int64_t value = random.Below(8) == 0 ? random.Between(-1, 1) : 0;
    PutElement(type, source.data(), i, value);
    const int64_t slice = i / p.inner / p.count;
    const int64_t to = rows[slice / p.outer * p.count + i / p.inner % p.count];
    if (to < 0) continue;
    int64_t& sum = want[(slice * p.extent + to) * p.inner + i % p.inner];
    sum = Reduced(reduction, sum, value);
  }
  const void* const base = from == From::kArray    ? x.data()
                           : from == From::kItself ? y.data()
                                                   : nullptr;
  bool ok = IndexReduce(p, reduction, type, index.data(), source.data(), base,
                        y.data(), Threads(2))
                .ok() &&
            y.Intact();
  for (int64_t i = 0; i < size; ++i) {
    const int64_t found = ElementOf(type, y.data(), i);
    ok = ok && (std::abs(want[i]) == 1000 ? found > 100 || found < -100
                                          : found == want[i]);
  }
  Expect(ok, [&] {
    return Describe("index_reduce", p) + Text(static_cast<int>(reduction),
                                              "type", static_cast<int>(type),
                                              "from", static_cast<int>(from));
  });
}

// Sums that are rounded, by as many threads: the same bits.
void CheckOrder(const IndexPlan& p) {
  const int64_t size = p.batch * p.outer * p.extent * p.inner;
  const int64_t added = p.batch * p.outer * p.count * p.inner;
  const Memory one(4 * size), many(4 * size), source(4 * added);
  const Memory index(p.batch * p.count * (p.wide ? 8 : 4));
  AnyIndices(p, index);
  for (int64_t i = 0; i < added; ++i) {
    Set(DType::kF32, source.data(), i,
        static_cast<double>(random.Between(-1000, 1000)) / 7);
  }
  const bool ok = IndexReduce(p, Reduction::kSum, SumType::kF32, index.data(),
                              source.data(), nullptr, one.data(), Threads(1))
                      .ok() &&
                  IndexReduce(p, Reduction::kSum, SumType::kF32, index.data(),
                              source.data(), nullptr, many.data(), Threads(3))
                      .ok();
  Expect(ok && std::memcmp(one.data(), many.data(), one.bytes()) == 0,
         [&] { return Describe("the order of sums", p); });
}

}  // namespace

void CheckIndex() {
  for (int64_t itemsize : {1, 2, 4, 8, 16}) {
    for (int i = 0; i < 60; ++i) CheckSelect(AnyPlan(itemsize));
  }
  constexpr int64_t kItemSizes[] = {4, 8, 2, 2, 1, 2, 4, 8};
  for (Reduction reduction :
       {Reduction::kSum, Reduction::kMax, Reduction::kMin}) {
    for (int type = 0; type < 8; ++type) {
      const auto as = static_cast<SumType>(type);
      for (From from : {From::kArray, From::kItself, From::kNothing}) {
        for (int i = 0; i < 15; ++i) {
          CheckReduce(AnyPlan(kItemSizes[type]), reduction, as, from);
        }
      }
      CheckReduce(PlanInParts(kItemSizes[type]), reduction, as, From::kArray);
    }
  }
  for (int i = 0; i < 10; ++i) CheckOrder(PlanInParts(4));
  for (int i = 0; i < 10; ++i) CheckOrder(AnyPlan(4));
}

}  // namespace jax_layout
