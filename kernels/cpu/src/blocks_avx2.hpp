// The blocks of AVX2 and bf16 whose sums take all but a few of the sixteen registers: compilers keep
// some of them in memory or copy them, and are a fifth to a third slower. The arithmetic is that of
// blocks.hpp, in its order.
#pragma once

alignas(32) constexpr uint32_t kHighHalves[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

#define COPPICE_ZERO(a) "vxorps %%ymm" #a ", %%ymm" #a ", %%ymm" #a "\n\t"
// Weights [8 * at, 8 * at + 8) of a unit, of each pair one half; the mask of the high ones is in 15.
#define COPPICE_HIGH(at, to) "vpand 32*" #at "(%[w]), %%ymm15, %%ymm" #to "\n\t"
#define COPPICE_LOW(at, to)                    \
  "vmovdqu 32*" #at "(%[w]), %%ymm" #to "\n\t" \
  "vpslld $16, %%ymm" #to ", %%ymm" #to "\n\t"
#define COPPICE_VALUE(r, half, to) "vbroadcastss 8*" #r "+" #half "(%[x]), %%ymm" #to "\n\t"
#define COPPICE_FMA(w, x, sum) "vfmadd231ps %%ymm" #w ", %%ymm" #x ", %%ymm" #sum "\n\t"
#define COPPICE_STORE(r, at, from) "vmovups %%ymm" #from ", 128*" #r "+32*" #at "(%[out])\n\t"

// A loop over the units of R rows; see Fetch::next.
#define COPPICE_LOOP(R, zero, body, store)                                                        \
  const char* far = fetched.far;                                                                  \
  asm volatile(zero                                                                               \
               "vmovdqa (%[mask]), %%ymm15\n\t"                                                   \
               ".p2align 5\n"                                                                     \
               "1:\n\t"                                                                           \
               "prefetcht0 %c[near](%[w])\n\t"                                                    \
               "prefetcht0 %c[near]+64(%[w])\n\t"                                                 \
               "prefetcht1 (%[far])\n\t"                                                          \
               "prefetcht1 64(%[far])\n\t"                                                        \
               body                                                                               \
               "add %[step], %[far]\n\t"                                                          \
               "add $8*" #R ", %[x]\n\t"                                                          \
               "sub $-128, %[w]\n\t"                                                              \
               "dec %[units]\n\t"                                                                 \
               "jnz 1b\n\t"                                                                       \
               store                                                                              \
               : [w] "+r"(w), [x] "+r"(x), [units] "+r"(units), [far] "+r"(far)                   \
               : [step] "r"(fetched.step), [mask] "r"(kHighHalves), [out] "r"(out),               \
                 [near] "i"(Fetch::kNear)                                                         \
               : "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9",  \
                 "ymm10", "ymm11", "ymm12", "ymm13", "ymm14", "ymm15", "cc", "memory");           \
  fetched.far = far;

// Panels: sums in 0 to 11, a row's two by its place; weights in 12 and 13.
#define COPPICE_ROW(half, r, a, b) \
  COPPICE_VALUE(r, half, 14) COPPICE_FMA(12, 14, a) COPPICE_FMA(13, 14, b)
#define COPPICE_ROWS4(half)                                                         \
  COPPICE_ROW(half, 0, 0, 1) COPPICE_ROW(half, 1, 2, 3) COPPICE_ROW(half, 2, 4, 5) \
  COPPICE_ROW(half, 3, 6, 7)
#define COPPICE_ROWS5(half) COPPICE_ROWS4(half) COPPICE_ROW(half, 4, 8, 9)
#define COPPICE_ROWS6(half) COPPICE_ROWS5(half) COPPICE_ROW(half, 5, 10, 11)
#define COPPICE_TWO(a, b) COPPICE_ZERO(a) COPPICE_ZERO(b)
#define COPPICE_ZERO4 COPPICE_TWO(0, 1) COPPICE_TWO(2, 3) COPPICE_TWO(4, 5) COPPICE_TWO(6, 7)
#define COPPICE_ZERO5 COPPICE_ZERO4 COPPICE_TWO(8, 9)
#define COPPICE_ZERO6 COPPICE_ZERO5 COPPICE_TWO(10, 11)
#define COPPICE_OUT(r, a, b) COPPICE_STORE(r, 0, a) COPPICE_STORE(r, 1, b)
#define COPPICE_OUT4 \
  COPPICE_OUT(0, 0, 1) COPPICE_OUT(1, 2, 3) COPPICE_OUT(2, 4, 5) COPPICE_OUT(3, 6, 7)
#define COPPICE_OUT5 COPPICE_OUT4 COPPICE_OUT(4, 8, 9)
#define COPPICE_OUT6 COPPICE_OUT5 COPPICE_OUT(5, 10, 11)
#define COPPICE_PANEL(R)                                                                    \
  template <>                                                                               \
  inline void panel<uint32_t, Halves, R>(const uint32_t* w, const Halves* x, int64_t units, \
                                         Fetch& fetched, float* out) {                      \
    COPPICE_LOOP(R, COPPICE_ZERO##R,                                                        \
                 COPPICE_HIGH(0, 12) COPPICE_HIGH(1, 13) COPPICE_ROWS##R(4)                 \
                 COPPICE_LOW(0, 12) COPPICE_LOW(1, 13) COPPICE_ROWS##R(0),                  \
                 COPPICE_OUT##R)                                                            \
  }
COPPICE_PANEL(4)
COPPICE_PANEL(5)
COPPICE_PANEL(6)

// A block of three rows: sums in 0 to 11, the rows' values in 12 to 14, weights in 15, where
// the mask is loaded first.
#define COPPICE_THREE(a, b, c) COPPICE_FMA(15, 12, a) COPPICE_FMA(15, 13, b) COPPICE_FMA(15, 14, c)
#define COPPICE_VALUES(half) \
  COPPICE_VALUE(0, half, 12) COPPICE_VALUE(1, half, 13) COPPICE_VALUE(2, half, 14)
#define COPPICE_HIGH3(at) "vmovdqa (%[mask]), %%ymm15\n\t" COPPICE_HIGH(at, 15)
template <>
inline void block<uint32_t, Halves, 3>(const uint32_t* w, const Halves* x, int64_t units,
                                       Fetch& fetched, float* out) {
  COPPICE_LOOP(3, COPPICE_ZERO6,
               COPPICE_VALUES(4)
               COPPICE_HIGH3(0) COPPICE_THREE(0, 4, 8) COPPICE_HIGH3(1) COPPICE_THREE(1, 5, 9)
               COPPICE_HIGH3(2) COPPICE_THREE(2, 6, 10) COPPICE_HIGH3(3) COPPICE_THREE(3, 7, 11)
               COPPICE_VALUES(0)
               COPPICE_LOW(0, 15) COPPICE_THREE(0, 4, 8) COPPICE_LOW(1, 15) COPPICE_THREE(1, 5, 9)
               COPPICE_LOW(2, 15) COPPICE_THREE(2, 6, 10) COPPICE_LOW(3, 15) COPPICE_THREE(3, 7, 11),
               COPPICE_OUT(0, 0, 1) COPPICE_STORE(0, 2, 2) COPPICE_STORE(0, 3, 3)
               COPPICE_OUT(1, 4, 5) COPPICE_STORE(1, 2, 6) COPPICE_STORE(1, 3, 7)
               COPPICE_OUT(2, 8, 9) COPPICE_STORE(2, 2, 10) COPPICE_STORE(2, 3, 11))
}
