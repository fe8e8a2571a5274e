// SPDX-License-Identifier: Apache-2.0
//
// Copies: what memory can do, the ceiling of every kernel that only moves data.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "benchmarks/native/thread_pool.h"

namespace jax_layout {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kLine = 64;

// Copies a line past the cache; dst is aligned to it.
inline void StreamLine(char* dst, const char* src) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
#elif defined(__AVX2__)
  for (int i = 0; i < kLine; i += 32) {
    _mm256_stream_si256(
        reinterpret_cast<__m256i*>(dst + i),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
  }
#elif defined(__SSE2__)
  for (int i = 0; i < kLine; i += 16) {
    _mm_stream_si128(
        reinterpret_cast<__m128i*>(dst + i),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i)));
  }
#else
  std::memcpy(dst, src, kLine);
#endif
}

inline void Fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Copies `streams` consecutive pages at a time, a line of each in turn.
void Stream(char* dst, const char* src, int64_t size, int64_t streams) {
  const int64_t group = streams * kPage;
  int64_t done = 0;
  for (; done + group <= size; done += group) {
    for (int64_t line = done; line < done + kPage; line += kLine) {
      for (int64_t s = 0; s < group; s += kPage) {
        StreamLine(dst + line + s, src + line + s);
      }
    }
  }
  Fence();
  std::memcpy(dst + done, src + done, size - done);
}

// Runs copy(offset, size) over the pieces of `size` bytes, several per thread.
template <typename Copy>
void InPieces(int64_t size, int threads, const Copy& copy) {
  const int64_t pieces = threads == 1 ? 1 : 8 * threads;
  // Whole groups of 16 pages, so that the streams of a piece stay together.
  const int64_t unit = 16 * kPage;
  const int64_t piece = std::max<int64_t>(1, size / pieces / unit) * unit;
  ThreadPool::OfSize(threads).ParallelFor(
      (size + piece - 1) / piece,
      [&](int64_t i) { copy(i * piece, std::min(piece, size - i * piece)); });
}

}  // namespace

// streams == 0: memcpy; else non-temporal stores over so many pages at a time.
extern "C" void jax_layout_copy(void* dst, const void* src, int64_t size,
                                int threads, int64_t streams) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  InPieces(size, threads, [=](int64_t offset, int64_t bytes) {
    if (streams == 0) {
      std::memcpy(to + offset, from + offset, bytes);
    } else {
      Stream(to + offset, from + offset, bytes, streams);
    }
  });
}

// A copy to memory that the process has never touched, and its release. Returns
// whether there was such memory.
extern "C" bool jax_layout_copy_fresh(const void* src, int64_t size,
                                      int threads, bool huge_pages) {
  constexpr int64_t kHugePage = 2 << 20;
  const int64_t room = size + kHugePage;
  void* raw = mmap(nullptr, room, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return false;
  const auto aligned = (reinterpret_cast<uintptr_t>(raw) + kHugePage - 1) /
                       kHugePage * kHugePage;
  madvise(raw, room, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  jax_layout_copy(reinterpret_cast<void*>(aligned), src, size, threads, 0);
  munmap(raw, room);
  return true;
}

}  // namespace jax_layout
