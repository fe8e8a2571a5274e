// SPDX-License-Identifier: Apache-2.0
//
// A lesser processor, for who asks the processor itself: preloaded, this lets
// CPUID fault (arch_prctl(2); Intel's from Ivy Bridge on) and answers in its
// place: with AVX-512 of Skylake's, if AVX512 is defined, or with AVX2 alone.
#include <asm/prctl.h>
#include <cpuid.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>

namespace {

struct Registers {
  uint32_t a, b, c, d;
};

constexpr uint32_t Bits() { return 0; }
template <class... Rest>
constexpr uint32_t Bits(int first, Rest... rest) {
  return (1u << first) | Bits(rest...);
}

// Features of AVX-512 F, DQ, CD, BW and VL, and the states of its registers,
// that are withheld too.
#ifdef AVX512
constexpr uint32_t kAvx512 = 0, kStates512 = 0;
#else
constexpr uint32_t kAvx512 = Bits(16, 17, 28, 30, 31),
                   kStates512 = Bits(5, 6, 7);
#endif

// What is left of an answer. Leaves 7, 13, 29, 30 and 36: features, states,
// tiles, their products, AVX10.
void Lessen(uint32_t leaf, uint32_t part, Registers* r) {
  if (leaf == 7 && part == 0) {
    r->b &= ~(kAvx512 | Bits(21, 26, 27));   // IFMA, PF, ER
    r->c &= ~Bits(1, 6, 11, 12, 14);         // VBMI, VNNI, BITALG, ...
    r->d &= ~Bits(2, 3, 8, 22, 23, 24, 25);  // FP16, AMX, ...
  } else if (leaf == 7 && part == 1) {
    r->a &= ~Bits(4, 5, 21, 23);     // AVX-VNNI, BF16, ...
    r->d &= ~Bits(4, 5, 8, 10, 19);  // the same of 8 bits, AVX10
  } else if (leaf == 13 && part == 0) {
    r->a &= ~(kStates512 | Bits(17, 18));  // and those of tiles
  } else if (leaf == 29 || leaf == 30 || leaf == 36) {
    *r = {};
  }
}

void SetFaults(bool on) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, on ? 0 : 1); }

void OnFault(int signal, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* code = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (code[0] != 0x0f || code[1] != 0xa2) {  // somebody's own mistake
    ::signal(signal, SIG_DFL);
    return;
  }
  const auto leaf = static_cast<uint32_t>(registers[REG_RAX]);
  const auto part = static_cast<uint32_t>(registers[REG_RCX]);
  Registers r;
  SetFaults(false);
  __cpuid_count(leaf, part, r.a, r.b, r.c, r.d);
  SetFaults(true);
  Lessen(leaf, part, &r);
  registers[REG_RAX] = r.a;
  registers[REG_RBX] = r.b;
  registers[REG_RCX] = r.c;
  registers[REG_RDX] = r.d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) void Start() {
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  SetFaults(true);
}

}  // namespace
