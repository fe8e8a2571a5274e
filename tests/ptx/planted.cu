// SPDX-License-Identifier: Apache-2.0
//
// Kernels with a defect each, which the machine must find, and the textbook's
// transposes, whose speed is known; test_machine.py and test_model.py run them.
#include <cuda_pipeline_primitives.h>

__constant__ int constants[4];
extern __shared__ unsigned shared[];

// kGood says that the defect is mended.
#define PLANT(name, body)                                                \
  template <bool kGood>                                                  \
  __device__ void name##Body(unsigned* y) body;                          \
  extern "C" __global__ void name(unsigned* y) { name##Body<false>(y); } \
  extern "C" __global__ void name##Mended(unsigned* y) { name##Body<true>(y); }

PLANT(Bounds, { y[threadIdx.x + (kGood ? 0 : 1)] = 1; })

PLANT(Alignment, {
  if (threadIdx.x < 8) {
    auto* at = reinterpret_cast<char*>(y) + threadIdx.x * 8 + (kGood ? 0 : 4);
    *reinterpret_cast<uint2*>(at) = make_uint2(1, 2);
  }
})

// On a host, nothing but the layout of vectors says that this is wrong.
PLANT(SharedAlignment, {
  if (threadIdx.x < 4) {
    auto* at = reinterpret_cast<char*>(shared) + threadIdx.x * 16;
    if (!kGood) at += 4;
    *reinterpret_cast<uint4*>(at) = make_uint4(1, 2, 3, 4);
  }
  __syncthreads();
  if (threadIdx.x < 4) y[threadIdx.x] = shared[threadIdx.x + 4];
})

PLANT(SharedBounds, {
  shared[threadIdx.x + (kGood ? 0 : 1)] = 1;
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x];
})

PLANT(LocalBounds, {
  unsigned local[8];
  for (unsigned i = 0; i < 8; ++i) local[i] = y[i];
  y[threadIdx.x] = local[kGood ? threadIdx.x & 7 : threadIdx.x & 15];
})

PLANT(Unwritten, {
  if (kGood || threadIdx.x != 5) shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = shared[63 - threadIdx.x];
})

PLANT(Exit, {
  if (!kGood && threadIdx.x == 7) return;
  shared[threadIdx.x] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x];
})

PLANT(TwoBarriers, {
  shared[threadIdx.x] = threadIdx.x;
  if (!kGood && threadIdx.x >= 32) {
    y[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = 2;
  } else {
    __syncthreads();
    y[threadIdx.x] = shared[threadIdx.x];
  }
})

PLANT(Race, {
  shared[threadIdx.x] = threadIdx.x;
  if (kGood) __syncthreads();
  y[threadIdx.x] = shared[63 - threadIdx.x];
})

// A store of the next round overtakes a load of this one: in order of threads
// or in reverse, the results are right.
PLANT(LateRace, {
  for (unsigned round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) shared[0] = round;
    __syncthreads();
    y[threadIdx.x] = shared[0];
    if (kGood) __syncthreads();
  }
})

// Two threads of one instruction store to one word.
PLANT(InstructionRace, {
  shared[kGood ? threadIdx.x : threadIdx.x / 2] = 7;
  __syncthreads();
  y[threadIdx.x] = shared[kGood ? threadIdx.x : threadIdx.x / 2];
})

PLANT(GlobalRace, { y[kGood ? threadIdx.x : threadIdx.x / 2] = threadIdx.x; })

PLANT(ReadOnly, {
  y[threadIdx.x] = threadIdx.x;
  if (!kGood) {
    asm volatile("membar.gl;" ::: "memory");
    y[threadIdx.x] = __ldg(y + threadIdx.x) + 1;
  }
})

PLANT(Constant, {
  if (!kGood)
    asm volatile("st.u32 [%0], 1;" ::"l"(constants + threadIdx.x % 4));
  y[threadIdx.x] = constants[threadIdx.x % 4];
})

PLANT(Shuffle, {
  if (kGood || threadIdx.x != 9) {
    y[threadIdx.x] = __shfl_sync(0xffffffffu, threadIdx.x, threadIdx.x ^ 1);
  }
})

// Copied, but is it there?
PLANT(Asynchronous, {
  __pipeline_memcpy_async(shared + 4 * threadIdx.x, y + 4 * threadIdx.x, 16);
  __pipeline_commit();
  if (kGood) __pipeline_wait_prior(0);
  __syncthreads();
  y[threadIdx.x] = shared[threadIdx.x ^ 1];
})

PLANT(Unknown, {
  if (!kGood) asm volatile("nanosleep.u32 20;");
  y[threadIdx.x] = 0;
})

// The textbook's, of a square matrix of n x n floats and blocks of 32 x 32.

extern "C" __global__ void Naive(const float* __restrict__ x,
                                 float* __restrict__ y, int n) {
  const int column = blockIdx.x * 32 + threadIdx.x;
  const int row = blockIdx.y * 32 + threadIdx.y;
  y[column * n + row] = x[row * n + column];
}

template <int kWidth, int kRows>
__device__ void Tiled(const float* __restrict__ x, float* __restrict__ y,
                      int n) {
  __shared__ float tile[32][kWidth];
  // n is a multiple of 32.
  x += (blockIdx.y * 32 + threadIdx.y) * n + blockIdx.x * 32 + threadIdx.x;
  y += (blockIdx.x * 32 + threadIdx.y) * n + blockIdx.y * 32 + threadIdx.x;
#pragma unroll
  for (int r = 0; r < 32; r += kRows) {
    tile[threadIdx.y + r][threadIdx.x] = x[r * n];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 32; r += kRows) {
    y[r * n] = tile[threadIdx.x][threadIdx.y + r];
  }
}

extern "C" __global__ void Unpadded(const float* __restrict__ x,
                                    float* __restrict__ y, int n) {
  Tiled<32, 32>(x, y, n);
}
extern "C" __global__ void Padded(const float* __restrict__ x,
                                  float* __restrict__ y, int n) {
  Tiled<33, 32>(x, y, n);
}
extern "C" __global__ void Coarsened(const float* __restrict__ x,
                                     float* __restrict__ y, int n) {
  Tiled<33, 8>(x, y, n);
}
