/* The small steps of a dense decode in bfloat16 on a CPU, where their number, not their arithmetic, is the cost: RMSNorm, SiLU
 * gate, and rotation + cache write + paged attention in one pass. Legend and meaning: attention_full.py, whose torch functions
 * are the reference. Sums and exponentials are float32. Compiled on demand with HEAD_DIM and GROUPS (query heads per key/value
 * head) fixed, so that accumulators stay in registers; GCC/Clang vector types, no instruction set of its own. Not for -ffast-math: vexp
 * rounds by adding a large number, which reassociation would undo. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define VECTORS (HEAD_DIM / LANES)
#define MAX_BLOCK 1024

typedef float f16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u16x32 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2)));

static inline f16 load(const uint16_t *p) {
    return (f16)(__builtin_convertvector(*(const u16x16 *)p, u16x32) << 16);
}

/* Round to nearest even; a NaN stays one. */
static inline void store(uint16_t *p, f16 x) {
    u16x32 bits = (u16x32)x;
    u16x32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16x32 is_nan = (u16x32)((bits & 0x7fffffff) > 0x7f800000);
    *(u16x16 *)p = __builtin_convertvector((is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded), u16x16);
}

static inline float sum(f16 x) {
    f16 y = x + __builtin_shuffle(x, (u16x32){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    y = y + __builtin_shuffle(y, (u16x32){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    y = y + __builtin_shuffle(y, (u16x32){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return y[0] + y[1];
}

static inline f16 splat(float x) { return x - (f16){0}; }

static inline f16 choose(u16x32 mask, f16 yes, f16 no) { return (f16)((mask & (u16x32)yes) | (~mask & (u16x32)no)); }

/* exp to a few ulp: x = n ln 2 + r, a polynomial in r, n into the exponent. Arguments are clamped to +-87; NaN stays NaN. */
static inline f16 vexp(f16 x) {
    x = choose((u16x32)(x < -87.0f), splat(-87.0f), x);
    x = choose((u16x32)(x > 87.0f), splat(87.0f), x);
    f16 shifted = x * 1.44269504f + 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer in the low bits */
    f16 n = shifted - 12582912.0f;
    f16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    f16 y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 0.5f;
    y = y * r * r + r + 1.0f;
    return (f16)((u16x32)y + ((u16x32)shifted << 23));
}

/* out, x [rows, size] with size a multiple of 16. */
void rms_norm(uint16_t *out, const uint16_t *x, const uint16_t *gain, int64_t rows, int64_t size, float eps) {
    for (int64_t r = 0; r < rows; r++, x += size, out += size) {
        f16 squares = {0};
        for (int64_t i = 0; i < size; i += LANES) {
            f16 v = load(x + i);
            squares += v * v;
        }
        f16 scale = splat(1.0f / sqrtf(sum(squares) / (float)size + eps));
        for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i) * scale * load(gain + i));
    }
}

/* out [rows, size] = silu(gate) * up for gate_up [rows, 2 * size], size a multiple of 16. */
void silu_mul(uint16_t *out, const uint16_t *gate_up, int64_t rows, int64_t size) {
    for (int64_t r = 0; r < rows; r++, gate_up += 2 * size, out += size)
        for (int64_t i = 0; i < size; i += LANES) {
            f16 gate = load(gate_up + i);
            store(out + i, gate / (1.0f + vexp(-gate)) * load(gate_up + size + i));
        }
}

/* One head in pair order: the optional per-head RMSNorm, then the rotation by turn [HEAD_DIM / 2] of (cos, sin). */
static void turned(float *out, const uint16_t *x, const uint16_t *gain, const float *turn, float eps) {
    float v[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM; i += LANES) *(f16 *)(v + i) = load(x + i);
    if (gain) {
        f16 squares = {0};
        for (int i = 0; i < HEAD_DIM; i += LANES) squares += *(f16 *)(v + i) * *(f16 *)(v + i);
        float scale = 1.0f / sqrtf(sum(squares) / HEAD_DIM + eps);
        uint16_t rounded[HEAD_DIM];
        for (int i = 0; i < HEAD_DIM; i += LANES) {
            store(rounded + i, *(f16 *)(v + i) * splat(scale) * load(gain + i));
            *(f16 *)(v + i) = load(rounded + i);
        }
    }
    for (int i = 0; i < HEAD_DIM; i += 2) {
        out[i] = v[i] * turn[i] - v[i + 1] * turn[i + 1];
        out[i + 1] = v[i] * turn[i + 1] + v[i + 1] * turn[i];
    }
}

/* The query heads of one sequence that share key/value head j: exact softmax(q k) v, block by block with a running maximum. */
static void attend(uint16_t *out, f16 q[GROUPS][VECTORS], const uint16_t *keys, const uint16_t *values, const int64_t *blocks,
                   int64_t block_stride, int64_t block_size, int64_t context) {
    f16 acc[GROUPS][VECTORS];
    float top[GROUPS], total[GROUPS], score[GROUPS][MAX_BLOCK];
    memset(acc, 0, sizeof acc);
    for (int g = 0; g < GROUPS; g++) top[g] = -1e30f, total[g] = 0; /* not -inf: -inf - -inf would be NaN */
    for (int64_t first = 0; first < context; first += block_size) {
        int64_t n = context - first < block_size ? context - first : block_size;
        const uint16_t *k = keys + blocks[first / block_size] * block_stride;
        const uint16_t *v = values + blocks[first / block_size] * block_stride;
        for (int64_t p = 0; p < n; p++, k += HEAD_DIM) {
            f16 key[VECTORS];
            for (int i = 0; i < VECTORS; i++) key[i] = load(k + i * LANES);
            for (int g = 0; g < GROUPS; g++) {
                f16 dot = q[g][0] * key[0];
                for (int i = 1; i < VECTORS; i++) dot += q[g][i] * key[i];
                score[g][p] = sum(dot);
            }
        }
        for (int g = 0; g < GROUPS; g++) {
            for (int64_t p = n; p % LANES; p++) score[g][p] = -INFINITY; /* e^-87 in the sum: nothing */
            f16 high = splat(top[g]);
            for (int64_t p = 0; p < n; p += LANES) {
                f16 some = *(f16 *)(score[g] + p);
                high = choose((u16x32)(some > high), some, high);
            }
            float highest = high[0];
            for (int i = 1; i < LANES; i++) highest = high[i] > highest ? high[i] : highest;
            f16 fade = vexp(splat(top[g] - highest)), mass = {0};
            for (int64_t p = 0; p < n; p += LANES) {
                f16 weight = vexp(*(f16 *)(score[g] + p) - highest);
                *(f16 *)(score[g] + p) = weight;
                mass += weight;
            }
            for (int i = 0; i < VECTORS; i++) acc[g][i] *= fade;
            total[g] = total[g] * fade[0] + sum(mass);
            top[g] = highest;
        }
        for (int64_t p = 0; p < n; p++, v += HEAD_DIM)
            for (int i = 0; i < VECTORS; i++) {
                f16 value = load(v + i * LANES);
                for (int g = 0; g < GROUPS; g++) acc[g][i] += splat(score[g][p]) * value;
            }
    }
    for (int g = 0; g < GROUPS; g++)
        for (int i = 0; i < VECTORS; i++) store(out + g * HEAD_DIM + i * LANES, acc[g][i] * splat(1.0f / total[g]));
}

/* One decode step of one layer for `sequences` tokens, one each. qkv [B, H + 2J, d] unrotated; pool [2, N, J, P, d]; table [B, M];
 * turn [B, d / 2, 2]; gain [H + J, d] or NULL. Writes the new key and value into the pool and the attention into out [B, H * d]. */
void decode(uint16_t *out, const uint16_t *qkv, uint16_t *pool, const int64_t *table, const int64_t *context, const float *turn,
            const uint16_t *gain, int64_t sequences, int64_t kv_heads, int64_t num_blocks, int64_t block_size, int64_t columns,
            float eps, int64_t threads) {
    const int64_t heads = kv_heads * GROUPS, block_stride = kv_heads * block_size * HEAD_DIM;
    const float scale = 1.0f / sqrtf((float)HEAD_DIM);
    (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t task = 0; task < sequences * kv_heads; task++) {
        const int64_t b = task / kv_heads, j = task % kv_heads, position = context[b] - 1;
        const uint16_t *row = qkv + b * (heads + 2 * kv_heads) * HEAD_DIM;
        const int64_t *blocks = table + b * columns;
        uint16_t *keys = pool + j * block_size * HEAD_DIM, *values = keys + num_blocks * block_stride;
        const int64_t at = blocks[position / block_size] * block_stride + position % block_size * HEAD_DIM;
        float wide[HEAD_DIM];
        turned(wide, row + (heads + j) * HEAD_DIM, gain ? gain + (heads + j) * HEAD_DIM : 0, turn + b * HEAD_DIM, eps);
        for (int i = 0; i < HEAD_DIM; i += LANES) store(keys + at + i, *(f16 *)(wide + i));
        memcpy(values + at, row + (heads + kv_heads + j) * HEAD_DIM, HEAD_DIM * sizeof(uint16_t));
        f16 q[GROUPS][VECTORS];
        for (int g = 0; g < GROUPS; g++) {
            const int64_t head = j * GROUPS + g;
            turned(wide, row + head * HEAD_DIM, gain ? gain + head * HEAD_DIM : 0, turn + b * HEAD_DIM, eps);
            for (int i = 0; i < VECTORS; i++) q[g][i] = *(f16 *)(wide + i * LANES) * splat(scale);
        }
        attend(out + (b * heads + j * GROUPS) * HEAD_DIM, q, keys, values, blocks, block_stride, block_size, context[b]);
    }
}
