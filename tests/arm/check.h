// SPDX-License-Identifier: Apache-2.0
//
// What the checks of kernels share: numbers, memory that notices what is read
// or written beyond it, and elements of any dtype. Values are small integers
// wherever sums of them are exact, so that results are compared exactly.
#ifndef JAX_LAYOUT_TESTS_ARM_CHECK_H_
#define JAX_LAYOUT_TESTS_ARM_CHECK_H_

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <sstream>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/float16.h"
#include "tests/threads.h"

namespace jax_layout {

inline int64_t checks = 0, failures = 0;

// "shape 3 4 type bfloat16", of a case that failed.
template <class... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  ((text << parts << ' '), ...);
  return text.str();
}

// The first few failures are printed.
template <class Say>
void Expect(bool ok, const Say& say) {
  ++checks;
  if (ok || ++failures > 10) return;
  std::printf("  wrong: %s\n", say().c_str());
}

// The same numbers in every run (xorshift64).
class Random {
 public:
  // In [0, n).
  int64_t Below(int64_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<int64_t>(state_ >> 1) % n;
  }
  int64_t Between(int64_t low, int64_t high) {
    return low + Below(high - low + 1);
  }
  template <class T>
  T Of(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<int64_t>(values.size()))];
  }
  bool Flip() { return Below(2) == 1; }

 private:
  uint64_t state_ = 88172645463325252;
};

// Bytes that end where a page begins that may not be touched; what lies before
// them must stay as it is.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    mapped_ = (bytes + kGuard + page - 1) / page * page + page;
    void* mapped = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) std::abort();
    first_ = static_cast<char*>(mapped);
    char* const end = first_ + mapped_ - page;
    if (mprotect(end, page, PROT_NONE) != 0) std::abort();
    data_ = end - bytes;
    std::memset(data_ - kGuard, kByte, kGuard + bytes);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { munmap(first_, mapped_); }

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  bool Intact() const {
    for (int64_t i = 1; i <= kGuard; ++i) {
      if (data_[-i] != kByte) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 256;
  static constexpr char kByte = 0x5a;
  int64_t bytes_, mapped_;
  char *first_, *data_;
};

// Real types alone.
inline double Get(DType type, const void* x, int64_t i) {
  switch (type) {
    case DType::kF32:
      return static_cast<const float*>(x)[i];
    case DType::kF64:
      return static_cast<const double*>(x)[i];
    case DType::kBF16:
      return FloatOfBf16(static_cast<const uint16_t*>(x)[i]);
    case DType::kF16:
      return FloatOfF16(static_cast<const uint16_t*>(x)[i]);
    case DType::kS8:
      return static_cast<const int8_t*>(x)[i];
    case DType::kS32:
      return static_cast<const int32_t*>(x)[i];
    default:
      std::abort();
  }
}

inline void Set(DType type, void* x, int64_t i, double value) {
  switch (type) {
    case DType::kF32:
      static_cast<float*>(x)[i] = static_cast<float>(value);
      return;
    case DType::kF64:
      static_cast<double*>(x)[i] = value;
      return;
    case DType::kBF16:
      static_cast<uint16_t*>(x)[i] = Bf16OfFloat(static_cast<float>(value));
      return;
    case DType::kF16:
      static_cast<uint16_t*>(x)[i] = F16OfFloat(static_cast<float>(value));
      return;
    case DType::kS8:
      static_cast<int8_t*>(x)[i] = static_cast<int8_t>(value);
      return;
    case DType::kS32:
      static_cast<int32_t*>(x)[i] = static_cast<int32_t>(value);
      return;
    default:
      std::abort();
  }
}

// A value as it is after a store in the type.
inline double Rounded(DType type, double value) {
  alignas(8) char element[8];
  Set(type, element, 0, value);
  return Get(type, element, 0);
}

// Units of the last place, about, of what a type holds.
inline double Epsilon(DType type) {
  return type == DType::kF64    ? 1e-14
         : type == DType::kBF16 ? 1. / 128
         : type == DType::kF16  ? 1. / 1024
                                : 1e-6;
}

inline bool Close(double got, double want, double tolerance) {
  return std::isnan(want) ? std::isnan(got)
                          : got == want || std::abs(got - want) <=
                                               tolerance * (1 + std::abs(want));
}

// An array of elements of a type.
struct Array {
  DType type;
  int64_t size;
  Memory memory;

  Array(DType t, int64_t n) : type(t), size(n), memory(n * ItemSize(t)) {}
  void* data() const { return memory.data(); }
  double operator[](int64_t i) const { return Get(type, data(), i); }
  void Put(int64_t i, double value) { Set(type, data(), i, value); }
  void Fill(Random* random, int64_t most = 3) {
    for (int64_t i = 0; i < size; ++i) Put(i, random->Between(-most, most));
  }
};

inline const char* Name(DType type) {
  return kDTypeNames[static_cast<int>(type)].data();
}

// Each is in a file of its own.
void CheckPermute();
void CheckDepthwise();
void CheckGrouped();
void CheckWinograd();
void CheckMatvec();
void CheckSkinny();
void CheckBlocked();
void CheckFinish();
void CheckMoments();
void CheckPool();
void CheckIndex();
void CheckGeam();
void CheckAttention();
// Of CheckMatvec(), on AArch64.
void CheckVectors();

}  // namespace jax_layout

#endif  // JAX_LAYOUT_TESTS_ARM_CHECK_H_
