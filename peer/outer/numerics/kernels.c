/* Loops over fp32 vectors: one pass over memory where a chain of tensor operations makes one for each.

   Every function computes what `kernels.py` says, with one IEEE rounding an operation, so that the bits are those of
   the tensor operations on every machine. The build forbids the compiler to contract a multiplication and an addition
   into one; nothing here may be built with -ffast-math. `setup.py` reads the next line.
   flags: -std=c11 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math
   Pointers never overlap but where that is said. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Which source this was made of: what was built of another is not used. */
unsigned long made_of(void)
{
    return SOURCE_CRC32;
}

/* The widest vectors that the processor at hand has, chosen when the library is loaded: glibc can do that. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif

#define INLINE __attribute__((always_inline)) static inline /* so that it has the vectors of its caller */

#define INFINITE 0x7F800000u
#define SMALLEST_NORMAL 0x1p-126f
#define ROUNDER 0x1.8p23f /* |x| < 2^22: the sum is x rounded to an integer, ties to even, and its low bits are that */

static inline uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Scales stand wherever a payload has them, at no alignment. */
static inline float float_at(const unsigned char *place)
{
    float x;
    memcpy(&x, place, sizeof x);
    return x;
}

static inline float within(float x, float least, float most)
{
    x = x < least ? least : x;
    return x > most ? most : x;
}

/* The bits of max |x|: as integers, magnitudes stand in the order of the numbers, and infinity and NaN above all. */
INLINE uint32_t largest_magnitude(const float *x, size_t n)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

#define LONGEST 2048 /* elements of a row that lies on the stack */

/* A row of x, or of x - minus, which is then written to `difference` and is of at most LONGEST elements. */
INLINE const float *row_at(const float *x, const float *minus, size_t first, size_t width, float *difference)
{
    if (!minus)
        return x + first;
    for (size_t i = 0; i < width; i++)
        difference[i] = x[first + i] - minus[first + i];
    return difference;
}

VECTORS int quantize_int8(
    const float *restrict x, const float *restrict minus, size_t n, size_t block, float least, float most,
    unsigned char *restrict scales, int8_t *restrict codes)
{
    float difference[LONGEST];
    for (size_t first = 0; first < n; first += block) {
        size_t width = n - first < block ? n - first : block;
        const float *row = row_at(x, minus, first, width, difference);
        int8_t *restrict out = codes + first;
        uint32_t largest = largest_magnitude(row, width);
        if (largest >= INFINITE)
            return 0;
        float scale = within(float_of(largest) / 127.0f, least, most);
        for (size_t i = 0; i < width; i++)
            out[i] = (int8_t)bits_of(row[i] / scale + ROUNDER);
        scale = largest ? scale : 0.0f;
        memcpy(scales, &scale, 4);
        scales += 4;
    }
    return 1;
}

INLINE void read_int8(
    const unsigned char *restrict scales, const int8_t *restrict codes, size_t n, size_t block, float *restrict out)
{
    for (size_t first = 0; first < n; first += block) {
        size_t width = n - first < block ? n - first : block;
        float scale = float_at(scales + 4 * (first / block));
        for (size_t i = 0; i < width; i++)
            out[first + i] = (float)codes[first + i] * scale;
    }
}

VECTORS int quantize_int4(
    const float *restrict x, const float *restrict minus, size_t n, size_t block, float least, float most,
    unsigned char *restrict scales, uint8_t *restrict codes)
{
    float difference[LONGEST];
    for (size_t first = 0; first < n; first += block) {
        size_t width = n - first < block ? n - first : block;
        const float *row = row_at(x, minus, first, width, difference);
        uint8_t *restrict out = codes + first / block * ((block + 1) / 2); /* rows begin at whole bytes */
        uint32_t largest = largest_magnitude(row, width);
        if (largest >= INFINITE)
            return 0;
        uint32_t scale = largest ? bits_of(within(float_of(largest) / 7.0f, least, most)) : 0;
        scale = (scale + 0x7FFFu + (scale >> 16 & 1)) >> 16; /* bf16, ties to even */
        float divisor = float_of(scale << 16);
        divisor = divisor < SMALLEST_NORMAL ? SMALLEST_NORMAL : divisor;
        for (size_t i = 0; i < width / 2; i++) {
            uint32_t low = bits_of(row[2 * i] / divisor + ROUNDER);
            uint32_t high = bits_of(row[2 * i + 1] / divisor + ROUNDER);
            out[i] = (uint8_t)((low & 15) | (high & 15) << 4);
        }
        if (width % 2)
            out[width / 2] = (uint8_t)(bits_of(row[width - 1] / divisor + ROUNDER) & 15);
        *scales++ = (unsigned char)scale;
        *scales++ = (unsigned char)(scale >> 8);
    }
    return 1;
}

/* x[0..half) += x[half..2 half) */
INLINE void halve(float *x, size_t half)
{
#pragma GCC ivdep
    for (size_t i = 0; i < half; i++)
        x[i] += x[half + i];
}

/* The sum of the elements by adding the second half to the first until one is left: `fold` of sums.py. */
INLINE float folded(float *x, size_t n)
{
    if (n == 256) { /* with numbers that the compiler knows, each step is a few vectors */
        halve(x, 128), halve(x, 64), halve(x, 32), halve(x, 16), halve(x, 8), halve(x, 4), halve(x, 2), halve(x, 1);
        return x[0];
    }
    for (; n > 1; n /= 2) {
        halve(x, n / 2);
        if (n % 2)
            x[0] += x[n - 1];
    }
    return x[0];
}

#define WIDEST 1024 /* elements of a row of int2, which lies on the stack in two copies */

static inline uint32_t bf16(float x, float least, float most)
{
    if (x < least)
        return 0;
    uint32_t bits = bits_of(x > most ? most : x);
    return (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16; /* ties to even */
}

/* Two of Lloyd's steps for the magnitudes of a row: two levels, as bf16 in one word, and the codes. 0: a sum that is not
   finite. */
INLINE int quantize_row_int2(
    const float *restrict row, size_t n, float least, float most, uint32_t *levels, uint8_t *restrict codes)
{
    float magnitudes[WIDEST], scratch[WIDEST];
    uint8_t span[WIDEST + 4];
    for (size_t i = 0; i < n; i++)
        magnitudes[i] = scratch[i] = float_of(bits_of(row[i]) & 0x7FFFFFFFu);
    float sum = folded(scratch, n), largest = float_of(largest_magnitude(row, n));
    if (!(bits_of(sum) < INFINITE))
        return 0;
    float cut = sum * (float)(0.8 / (double)n) + largest * (float)(1.0 - 0.8), low = 0.0f, high = 0.0f;
    for (int step = 0; step < 2; step++) {
        int32_t above = 0;
        for (size_t i = 0; i < n; i++) {
            uint32_t mask = 0u - (uint32_t)(magnitudes[i] > cut);
            above -= (int32_t)mask;
            scratch[i] = float_of(bits_of(magnitudes[i]) & mask);
        }
        float high_sum = folded(scratch, n), low_sum = sum - high_sum;
        int32_t below = (int32_t)n - above;
        low = (low_sum > 0.0f ? low_sum : 0.0f) / (float)(below > 0 ? below : 1);
        high = high_sum / (float)(above > 0 ? above : 1);
        high = low > high ? low : high;
        cut = (float)(((double)low + (double)high) / 2.0);
    }
    *levels = bf16(low, least, most) | bf16(high, least, most) << 16;
    for (size_t i = 0; i < n; i++)
        span[i] = (uint8_t)((uint32_t)(magnitudes[i] > cut) << 1 | bits_of(row[i]) >> 31);
    memset(span + n, 0, 4);
    for (size_t i = 0; i < (n + 3) / 4; i++) {
        uint32_t four;
        memcpy(&four, span + 4 * i, 4);
        four |= four >> 6;
        codes[i] = (uint8_t)(four | four >> 12);
    }
    return 1;
}

VECTORS int quantize_int2(
    const float *restrict x, const float *restrict minus, size_t n, size_t block, float least, float most,
    unsigned char *restrict scales, uint8_t *restrict codes)
{
    float difference[LONGEST];
    if (block > WIDEST)
        return 0;
    for (size_t first = 0; first < n; first += block) {
        const float *row = row_at(x, minus, first, block, difference);
        uint32_t levels;
        int finite = block == 256 ? quantize_row_int2(row, 256, least, most, &levels, codes)
                                  : quantize_row_int2(row, block, least, most, &levels, codes);
        if (!finite)
            return 0;
        for (int byte = 0; byte < 4; byte++)
            *scales++ = (unsigned char)(levels >> 8 * byte);
        codes += (block + 3) / 4;
    }
    return 1;
}

/* Codes of 4 bits, two to a byte, with 8 added so that none is negative: in pairs, as words of 16 bits, which a compiler
   turns into vectors. SPAN of them at a time lie on the stack. */
#define SPAN 256

INLINE void unpack_nibbles(const uint8_t *restrict packed, size_t n, uint8_t *restrict codes)
{
    for (size_t i = 0; i < n / 2; i++) {
        uint16_t pair = (uint16_t)(((packed[i] & 0x0F) | (packed[i] & 0xF0) << 4) ^ 0x0808);
        memcpy(codes + 2 * i, &pair, 2);
    }
    if (n % 2)
        codes[n - 1] = (packed[n / 2] & 0x0F) ^ 8;
}

INLINE void read_int4(
    const unsigned char *restrict scales, const uint8_t *restrict codes, size_t n, size_t block,
    float *restrict out)
{
    for (size_t first = 0; first < n; first += block) {
        size_t width = n - first < block ? n - first : block;
        const uint8_t *restrict row = codes + first / block * ((block + 1) / 2);
        const unsigned char *half = scales + 2 * (first / block);
        float scale = float_of((uint32_t)half[0] << 16 | (uint32_t)half[1] << 24);
        for (size_t at = 0; at < width; at += SPAN) {
            uint8_t span[SPAN];
            size_t count = width - at < SPAN ? width - at : SPAN;
            unpack_nibbles(row + at / 2, count, span);
            for (size_t i = 0; i < count; i++)
                out[first + at + i] = (float)((int)span[i] - 8) * scale;
        }
    }
}

INLINE void read_int2(
    const unsigned char *restrict scales, const uint8_t *restrict codes, size_t n, size_t block,
    float *restrict out)
{
    for (size_t first = 0; first < n; first += block) {
        size_t width = n - first < block ? n - first : block;
        const uint8_t *restrict row = codes + first / block * ((block + 3) / 4);
        const unsigned char *levels = scales + 4 * (first / block);
        uint32_t low = (uint32_t)levels[0] << 16 | (uint32_t)levels[1] << 24;
        uint32_t either = low ^ ((uint32_t)levels[2] << 16 | (uint32_t)levels[3] << 24);
        for (size_t at = 0; at < width; at += SPAN) {
            uint8_t span[SPAN];
            size_t count = width - at < SPAN ? width - at : SPAN;
            for (size_t i = 0; i < (count + 3) / 4; i++) {
                uint32_t byte = row[at / 4 + i], four = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303u;
                memcpy(span + 4 * i, &four, 4);
            }
            for (size_t i = 0; i < count; i++) {
                uint32_t code = span[i], level = low ^ (either & (0u - (code >> 1)));
                out[first + at + i] = float_of(level | code << 31);
            }
        }
    }
}

#define DEFINE_DEQUANTIZE(BITS, CODE)                                                                                 \
    VECTORS void dequantize_int##BITS(                                                                                \
        const unsigned char *restrict scales, const CODE *restrict codes, size_t n, size_t block, float *restrict out) \
    {                                                                                                                 \
        read_int##BITS(scales, codes, n, block, out);                                                                 \
    }

DEFINE_DEQUANTIZE(8, int8_t)
DEFINE_DEQUANTIZE(4, uint8_t)
DEFINE_DEQUANTIZE(2, uint8_t)

/* By its bits a scale is 0 or within [low, high]: NaN, infinity and negative numbers are above, subnormal ones below. */
static inline int outside(uint32_t scale, uint32_t low, uint32_t high)
{
    return (scale != 0) & ((scale < low) | (scale > high));
}

/* The checks answer no when in doubt: the caller then checks again, more slowly, and words the error. */

VECTORS int check_int8(
    const unsigned char *restrict scales, const int8_t *restrict codes, size_t n, size_t block, uint32_t low,
    uint32_t high)
{
    if (!block)
        return 0;
    int wrong = 0;
    for (size_t i = 0; i < (n + block - 1) / block; i++)
        wrong |= outside(bits_of(float_at(scales + 4 * i)), low, high);
    int8_t least = 0;
    for (size_t i = 0; i < n; i++)
        least = codes[i] < least ? codes[i] : least;
    return !wrong && least > INT8_MIN;
}

VECTORS int check_int4(
    const unsigned char *restrict scales, const uint8_t *restrict codes, size_t n, size_t block, uint32_t low,
    uint32_t high)
{
    if (!block)
        return 0;
    int wrong = 0;
    for (size_t i = 0; i < (n + block - 1) / block; i++)
        wrong |= outside((uint32_t)scales[2 * i] | (uint32_t)scales[2 * i + 1] << 8, low, high);
    size_t row = (block + 1) / 2, whole = n / block * row, rest = n % block;
    uint8_t forbidden = 0;
    for (size_t i = 0; i < whole + (rest + 1) / 2; i++) {
        uint8_t byte = codes[i] ^ 0x88; /* a code of -8 is now a half of zeros */
        forbidden |= (uint8_t)(((byte & 0x0F) - 1) & 0x80) | (uint8_t)((byte < 0x10) << 7);
    }
    if (block % 2)
        for (size_t i = row - 1; i < whole; i += row)
            wrong |= codes[i] > 0x0F; /* padding */
    if (rest % 2)
        wrong |= codes[whole + rest / 2] > 0x0F;
    return !wrong && !forbidden;
}

VECTORS int all_finite(const float *x, size_t n)
{
    return largest_magnitude(x, n) < INFINITE;
}

VECTORS float largest(const float *x, size_t n)
{
    return float_of(largest_magnitude(x, n));
}

/* Of vectors that are rounded to integers first: no magnitude times its scale is above 2^15, so that sums of up to 2^23
   products are exact, in whatever order. LANES of them are added side by side. */
#define STRIP 1024 /* values of each vector that lie in `strips` at a time */
#define LANES 32

VECTORS void inner_products(
    const float *const *vectors, const float *scales, size_t count, size_t n, double *restrict strips,
    double *restrict sums)
{
    for (size_t at = 0; at < n; at += STRIP) {
        size_t width = n - at < STRIP ? n - at : STRIP;
        for (size_t i = 0; i < count; i++) {
            const float *x = vectors[i] + at;
            double *restrict own = strips + i * STRIP;
            float scale = scales[i];
            for (size_t k = 0; k < width; k++)
                own[k] = (double)((x[k] * scale + ROUNDER) - ROUNDER);
            for (size_t k = width; k < STRIP; k++)
                own[k] = 0.0;
            for (size_t j = 0; j <= i; j++) {
                const double *other = strips + j * STRIP;
                double lanes[LANES] = {0.0}, sum = 0.0;
                for (size_t k = 0; k < STRIP; k += LANES)
                    for (size_t lane = 0; lane < LANES; lane++)
                        lanes[lane] += own[k + lane] * other[k + lane];
                for (size_t lane = 0; lane < LANES; lane++)
                    sum += lanes[lane];
                sums[i * count + j] += sum;
            }
        }
    }
}

VECTORS void add_scaled(float *restrict total, const float *restrict x, size_t n, float factor)
{
    for (size_t i = 0; i < n; i++)
        total[i] += x[i] * factor;
}

/* `anchor` and `new_anchor` may be the same memory, and so may `momentum` and `new_momentum`: an element is read before
   it is written, and no other is read after. */
INLINE void descend(
    const float *anchor, const float *momentum, const float *restrict update, size_t n, float beta, float lr,
    float *new_anchor, float *new_momentum)
{
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        float m = momentum[i] * beta + update[i];
        float a = anchor[i] - (m * beta + update[i]) * lr;
        new_momentum[i] = m;
        new_anchor[i] = a;
    }
}

VECTORS void nesterov(
    const float *anchor, const float *momentum, const float *restrict update, size_t n, float beta, float lr,
    float *new_anchor, float *new_momentum)
{
    descend(anchor, momentum, update, n, beta, lr, new_anchor, new_momentum);
}

/* The same, of an update that is read from its payload as it is needed: it lies on the stack, some rows at a time. */
#define DEFINE_NESTEROV(BITS, CODE, SCALE_BYTES)                                                                      \
    VECTORS void nesterov_int##BITS(                                                                                  \
        const unsigned char *restrict scales, const CODE *restrict codes, size_t n, size_t block,                     \
        const float *anchor, const float *momentum, float beta, float lr, float *new_anchor, float *new_momentum)     \
    {                                                                                                                 \
        size_t rows = LONGEST / block;                                                                                \
        for (size_t first = 0; first < n; first += rows * block) {                                                    \
            float update[LONGEST];                                                                                    \
            size_t count = n - first < rows * block ? n - first : rows * block;                                       \
            read_int##BITS(scales, codes, count, block, update);                                                      \
            descend(                                                                                                  \
                anchor + first, momentum + first, update, count, beta, lr, new_anchor + first, new_momentum + first); \
            scales += rows * SCALE_BYTES;                                                                             \
            codes += rows * ((block * BITS + 7) / 8);                                                                 \
        }                                                                                                             \
    }

DEFINE_NESTEROV(8, int8_t, 4)
DEFINE_NESTEROV(4, uint8_t, 2)
DEFINE_NESTEROV(2, uint8_t, 4)
