/* CRC32C: the CPU's instruction in three lanes where there is one, else eight tables. */
#include <stdint.h>
#include <string.h>

#include "crc32c_table.h"
#include "internal.h"

static uint32_t crc_portable(uint32_t crc, const uint8_t *data, int64_t nbytes)
{
    while (nbytes >= 8) {
        uint32_t low, high;
        memcpy(&low, data, 4);
        memcpy(&high, data + 4, 4);
        low ^= crc;
        crc = crc32c_table[7][low & 0xFF] ^ crc32c_table[6][low >> 8 & 0xFF] ^ crc32c_table[5][low >> 16 & 0xFF] ^
              crc32c_table[4][low >> 24] ^ crc32c_table[3][high & 0xFF] ^ crc32c_table[2][high >> 8 & 0xFF] ^
              crc32c_table[1][high >> 16 & 0xFF] ^ crc32c_table[0][high >> 24];
        data += 8;
        nbytes -= 8;
    }
    while (nbytes-- > 0)
        crc = crc >> 8 ^ crc32c_table[0][(crc ^ *data++) & 0xFF];
    return crc;
}

#if defined(__x86_64__)
#include <immintrin.h>

/* Lanes are multiples of 8 bytes; three long ones nearly fill a block of 4096. */
#define LANE_LONG 1360
#define LANE_SHORT 168
/* x^(8n - 33) mod P, reflected, for one and two lanes of n bytes: a carry-less product with it, reduced by the crc instruction,
 * appends n zero bytes. */
#define LONG_1 0x3f70cc6fULL
#define LONG_2 0x5aa1f3cfULL
#define SHORT_1 0x1b3d8f29ULL
#define SHORT_2 0xa60ce07bULL

static inline uint64_t word(const uint8_t *data)
{
    uint64_t value;
    memcpy(&value, data, 8);
    return value;
}

__attribute__((target("sse4.2,pclmul"))) static inline uint32_t append_zeros(uint32_t crc, uint64_t factor)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128((int64_t)crc), _mm_cvtsi64_si128((int64_t)factor), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

__attribute__((target("sse4.2,pclmul"))) static inline uint32_t three_lanes(uint32_t crc, const uint8_t *data, int64_t lane,
                                                                             uint64_t factor1, uint64_t factor2)
{
    uint64_t a = crc, b = 0, c = 0;
    int64_t i;
    for (i = 0; i < lane; i += 8) {
        a = _mm_crc32_u64(a, word(data + i));
        b = _mm_crc32_u64(b, word(data + lane + i));
        c = _mm_crc32_u64(c, word(data + 2 * lane + i));
    }
    return append_zeros((uint32_t)a, factor2) ^ append_zeros((uint32_t)b, factor1) ^ (uint32_t)c;
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_native(uint32_t start, const uint8_t *data, int64_t nbytes)
{
    uint64_t crc;
    for (; nbytes >= 3 * LANE_LONG; data += 3 * LANE_LONG, nbytes -= 3 * LANE_LONG)
        start = three_lanes(start, data, LANE_LONG, LONG_1, LONG_2);
    for (; nbytes >= 3 * LANE_SHORT; data += 3 * LANE_SHORT, nbytes -= 3 * LANE_SHORT)
        start = three_lanes(start, data, LANE_SHORT, SHORT_1, SHORT_2);
    crc = start;
    for (; nbytes >= 8; data += 8, nbytes -= 8)
        crc = _mm_crc32_u64(crc, word(data));
    start = (uint32_t)crc;
    while (nbytes-- > 0)
        start = _mm_crc32_u8(start, *data++);
    return start;
}

static int32_t has_native(void) { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>

static uint32_t crc_native(uint32_t crc, const uint8_t *data, int64_t nbytes)
{
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        uint64_t value;
        memcpy(&value, data, 8);
        crc = __crc32cd(crc, value);
    }
    while (nbytes-- > 0)
        crc = __crc32cb(crc, *data++);
    return crc;
}

static int32_t has_native(void) { return 1; }
#else
static uint32_t crc_native(uint32_t crc, const uint8_t *data, int64_t nbytes) { return crc_portable(crc, data, nbytes); }
static int32_t has_native(void) { return 0; }
#endif

uint32_t kvr_crc(uint32_t value, const uint8_t *data, int64_t nbytes)
{
    return ~(has_native() ? crc_native(~value, data, nbytes) : crc_portable(~value, data, nbytes));
}

int32_t kvr_crc32c(uint32_t value, const void *data, int64_t nbytes, uint32_t *out)
{
    if (nbytes < 0)
        return kvr_fail(KVR_ERROR_RANGE, KVR_DETAIL_NBYTES_RANGE, "crc32c", nbytes, KVR_NBYTES_MAX, 0, 0);
    *out = kvr_crc(value, data, nbytes);
    return KVR_OK;
}
