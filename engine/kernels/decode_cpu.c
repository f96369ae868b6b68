/* The dense decode in bfloat16 on a CPU: matrix products of a few rows, which stream the weights once, and between them RMSNorm, SiLU
 * gate, and rotation + cache write + paged attention in one pass; `forward` runs all layers of a step in one parallel region, since
 * the number of small steps, not their arithmetic, is what they cost. Legend and meaning: attention_full.py and dense.py, whose torch
 * functions are the reference. Sums and exponentials are float32. Compiled on demand with HEAD_DIM and GROUPS (query heads per
 * key/value head) fixed, so that accumulators stay in registers; GCC/Clang vector types, and AVX512-BF16's product and AMX's tiles where
 * the compiler targets them. Not for -ffast-math: vexp rounds by adding a large number, which reassociation would undo. */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define AMX
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#define LANES 16
#define VECTORS (HEAD_DIM / LANES)
#define MAX_BLOCK 1024

typedef float f16 __attribute__((vector_size(64), aligned(4), may_alias)); /* they read what was stored as other types */
typedef uint32_t u16x32 __attribute__((vector_size(64), aligned(2), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));

static inline f16 load(const uint16_t *p) {
    return (f16)(__builtin_convertvector(*(const u16x16 *)p, u16x32) << 16);
}

/* Round to nearest even; a NaN stays one. */
static inline void store(uint16_t *p, f16 x) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)x)); /* subnormal results become 0 */
#else
    u16x32 bits = (u16x32)x;
    u16x32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u16x32 is_nan = (u16x32)((bits & 0x7fffffff) > 0x7f800000);
    *(u16x16 *)p = __builtin_convertvector((is_nan & ((bits >> 16) | 0x40)) | (~is_nan & rounded), u16x16);
#endif
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

/* What the tokens t of a step share: their sequences owner [T] (NULL: one token each), table [B, columns] of these, context [T] the tokens
 * that t sees, itself included; turn [T, d / 2, 2]; pools are [2, N, J, P, d]. */
typedef struct {
    const int64_t *owner, *table, *context;
    const float *turn;
    int64_t kv_heads, num_blocks, block_size, columns;
    float eps;
} Step;

/* Task t * kv_heads + j: the new key and value of one token and key/value head into the pool. qkv [T, H + 2J, d] unrotated; gain
 * [H + J, d] or NULL. */
static void keep(const uint16_t *qkv, uint16_t *pool, const uint16_t *gain, const Step *step, int64_t task) {
    const int64_t kv_heads = step->kv_heads, block_size = step->block_size, heads = kv_heads * GROUPS;
    const int64_t t = task / kv_heads, j = task % kv_heads, position = step->context[t] - 1;
    const uint16_t *row = qkv + t * (heads + 2 * kv_heads) * HEAD_DIM;
    const int64_t block = step->table[(step->owner ? step->owner[t] : t) * step->columns + position / block_size];
    uint16_t *key = pool + ((block * kv_heads + j) * block_size + position % block_size) * HEAD_DIM;
    float wide[HEAD_DIM];
    turned(wide, row + (heads + j) * HEAD_DIM, gain ? gain + (heads + j) * HEAD_DIM : 0, step->turn + t * HEAD_DIM, step->eps);
    for (int i = 0; i < HEAD_DIM; i += LANES) store(key + i, *(f16 *)(wide + i));
    memcpy(key + step->num_blocks * kv_heads * block_size * HEAD_DIM, row + (heads + kv_heads + j) * HEAD_DIM, HEAD_DIM * sizeof *key);
}

/* The same task's attention into out [T, H * d], once the keys and values it sees are in the pool. */
static void attention(uint16_t *out, const uint16_t *qkv, const uint16_t *pool, const uint16_t *gain, const Step *step, int64_t task) {
    const int64_t kv_heads = step->kv_heads, block_size = step->block_size;
    const int64_t heads = kv_heads * GROUPS, block_stride = kv_heads * block_size * HEAD_DIM;
    const float scale = 1.0f / sqrtf((float)HEAD_DIM);
    const int64_t t = task / kv_heads, j = task % kv_heads;
    const uint16_t *row = qkv + t * (heads + 2 * kv_heads) * HEAD_DIM;
    const int64_t *blocks = step->table + (step->owner ? step->owner[t] : t) * step->columns;
    const uint16_t *keys = pool + j * block_size * HEAD_DIM, *values = keys + step->num_blocks * block_stride;
    float wide[HEAD_DIM];
    f16 q[GROUPS][VECTORS];
    for (int g = 0; g < GROUPS; g++) {
        const int64_t head = j * GROUPS + g;
        turned(wide, row + head * HEAD_DIM, gain ? gain + head * HEAD_DIM : 0, step->turn + t * HEAD_DIM, step->eps);
        for (int i = 0; i < VECTORS; i++) q[g][i] = *(f16 *)(wide + i * LANES) * splat(scale);
    }
    attend(out + (t * heads + j * GROUPS) * HEAD_DIM, q, keys, values, blocks, block_stride, block_size, step->context[t]);
}

/* One layer's attention for `sequences` tokens, one each. */
void decode(uint16_t *out, const uint16_t *qkv, uint16_t *pool, const int64_t *table, const int64_t *context, const float *turn,
            const uint16_t *gain, int64_t sequences, int64_t kv_heads, int64_t num_blocks, int64_t block_size, int64_t columns,
            float eps, int64_t threads) {
    const Step step = {0, table, context, turn, kv_heads, num_blocks, block_size, columns, eps};
    (void)threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t task = 0; task < sequences * kv_heads; task++) {
        keep(qkv, pool, gain, &step, task);
        attention(out, qkv, pool, gain, &step, task);
    }
}

/* -- matrix products ---------------------------------------------------------------------------------------------------------- */

/* y = x w^T + bias for w [out, in] row-major, a panel of LANES outputs at a time; rows of x lie `in` apart. */
typedef struct {
    const uint16_t *weight, *bias; /* bias may be NULL */
    int64_t in, out;
} Linear;

#define STEP 32 /* inputs per vector of bfloat16 pairs */

/* acc + the products of 32 pairs, two to a lane; the order of the sum is nobody's business. */
static inline f16 dot(f16 acc, const uint16_t *w, const uint16_t *x) {
#ifdef __AVX512BF16__
    return (f16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(w), (__m512bh)_mm512_loadu_si512(x));
#else
    const u16x32 pairs = *(const u16x32 *)w, others = *(const u16x32 *)x;
    acc += (f16)(pairs << 16) * (f16)(others << 16);
    return acc + (f16)(pairs & 0xffff0000) * (f16)(others & 0xffff0000);
#endif
}

/* The sums of sixteen vectors, in their order: four rounds of adding halves. */
static inline f16 sums(const f16 *v) {
    f16 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = __builtin_shuffle(v[i], v[i + 8], (u16x32){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
               __builtin_shuffle(v[i], v[i + 8], (u16x32){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = __builtin_shuffle(a[i], a[i + 4], (u16x32){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}) +
               __builtin_shuffle(a[i], a[i + 4], (u16x32){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_shuffle(b[i], b[i + 2], (u16x32){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
               __builtin_shuffle(b[i], b[i + 2], (u16x32){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    return __builtin_shuffle(c[0], c[1], (u16x32){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}) +
           __builtin_shuffle(c[0], c[1], (u16x32){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
}

/* A tile of ROWS x OUTS = 16 products, into y[r][o] (rows LANES apart). `ahead` elements on, the weights are prefetched. */
#define TILE(NAME, ROWS, OUTS)                                                                                              \
    static void NAME(float *y, const uint16_t *w, const uint16_t *x, int64_t in, int64_t ahead) {                           \
        f16 acc[LANES];                                                                                                     \
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) acc[i] = (f16){0};                                         \
        int64_t k = 0;                                                                                                      \
        for (; k + STEP <= in; k += STEP)                                                                                   \
            _Pragma("GCC unroll 16") for (int o = 0; o < OUTS; o++) {                                                       \
                if (ahead) __builtin_prefetch(w + o * in + k + ahead);                                                      \
                _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                     \
                    acc[r * OUTS + o] = dot(acc[r * OUTS + o], w + o * in + k, x + r * in + k);                             \
            }                                                                                                               \
        if (k < in) {                                                                                                       \
            uint16_t weights[OUTS][STEP] = {{0}}, values[ROWS][STEP] = {{0}};                                               \
            for (int o = 0; o < OUTS; o++) memcpy(weights[o], w + o * in + k, (in - k) * sizeof *w);                        \
            for (int r = 0; r < ROWS; r++) memcpy(values[r], x + r * in + k, (in - k) * sizeof *x);                         \
            _Pragma("GCC unroll 16") for (int o = 0; o < OUTS; o++)                                                         \
                _Pragma("GCC unroll 16") for (int r = 0; r < ROWS; r++)                                                     \
                    acc[r * OUTS + o] = dot(acc[r * OUTS + o], weights[o], values[r]);                                      \
        }                                                                                                                   \
        const f16 total = sums(acc);                                                                                        \
        for (int r = 0; r < ROWS; r++) memcpy(y + r * LANES, (const float *)&total + r * OUTS, OUTS * sizeof *y);           \
    }
TILE(tile_1x16, 1, 16)
TILE(tile_2x8, 2, 8)
TILE(tile_4x4, 4, 4)

#define ROWS 64 /* of x per panel at a time */

/* A thread's share of the work, `mine` of `threads`, and its room for x as AMX reads it; NULL: products by vectors. */
typedef struct {
    int64_t mine, threads;
    uint16_t *packed;
} Worker;

#ifdef AMX

#define TILE_VALUES 512       /* bfloat16 of a tile: 16 rows of 64 bytes */
#define PACKED_VALUES 262144  /* 512 KiB of x stay in the second-level cache while the weights go by */
#define MIN_TILE_ROWS 8       /* fewer are faster by vectors, which need not pack x */

static int tiles_granted; /* by the system, which saves the tiles of a process only when asked to */

int64_t request_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    tiles_granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return tiles_granted;
}

/* Rows of x packed at a time for products of `in` inputs. */
static int64_t rows_packed(int64_t in) {
    const int64_t fitting = PACKED_VALUES / (in + STEP) & ~(ROWS - 1);
    return fitting > ROWS ? fitting : ROWS;
}

/* Bytes of packed x for products of `rows` rows. */
static int64_t packed_bytes(int64_t rows, int64_t in) {
    const int64_t some = rows < rows_packed(in) ? rows : rows_packed(in);
    return (some + 15) / 16 * ((in + STEP - 1) / STEP) * TILE_VALUES * sizeof(uint16_t);
}

/* Tile registers and packed_bytes for products of `rows` rows; without them the vectors do it. */
static void begin(Worker *worker, int64_t rows, int64_t bytes) {
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    worker->packed = 0;
    if (!tiles_granted || rows < MIN_TILE_ROWS) return;
    worker->packed = aligned_alloc(64, bytes);
    if (worker->packed) _tile_loadconfig(&config);
}

/* Released registers are not saved at every switch of threads, and leave others, torch among them, their own configuration. */
static void end(Worker *worker) {
    if (!worker->packed) return;
    _tile_release();
    free(worker->packed);
}

/* 16 x 16 values of 32 bits: bit by bit of the indices, what lies off the diagonal changes places. */
static inline void transpose(f16 *v) {
    const u16x32 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int bit = 8; bit; bit >>= 1) {
        const u16x32 low = lane + ((u16x32)((lane & bit) != 0) & (16 - bit)), high = low + bit;
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & bit)) {
                const f16 a = v[i], b = v[i + bit];
                v[i] = __builtin_shuffle(a, b, low);
                v[i + bit] = __builtin_shuffle(a, b, high);
            }
    }
}

/* x [rows, in] as tiles [rows / 16][in / 32] of 16 pairs of inputs by 16 rows, padded with zeros. */
static void pack(uint16_t *packed, const uint16_t *x, int64_t rows, int64_t in) {
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t k = 0; k < in; k += STEP, packed += TILE_VALUES) {
            const int64_t width = in - k < STEP ? in - k : STEP;
            f16 v[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                v[i] = (f16){0};
                if (r + i < rows && width == STEP) v[i] = *(const f16 *)(x + (r + i) * in + k);
                if (r + i < rows && width < STEP) memcpy(v + i, x + (r + i) * in + k, width * sizeof *x);
            }
            transpose(v);
            for (int i = 0; i < LANES; i++) *(f16 *)(packed + i * STEP) = v[i];
        }
    __asm__ volatile("" : : "r"(packed) : "memory"); /* the intrinsics do not tell the compiler that tile loads read memory */
}

#define MULTIPLY_TILES(W0, W1, STRIDE, X0, X1) \
    do {                                       \
        _tile_loadd(4, W0, STRIDE);            \
        _tile_loadd(6, X0, 64);                \
        _tile_dpbf16ps(0, 4, 6);               \
        _tile_loadd(7, X1, 64);                \
        _tile_dpbf16ps(1, 4, 7);               \
        _tile_loadd(5, W1, STRIDE);            \
        _tile_dpbf16ps(2, 5, 6);               \
        _tile_dpbf16ps(3, 5, 7);               \
    } while (0)

/* Two panels of weights times up to 32 packed rows into y[0], y[1] [rows, LANES]; the rows that fill up a tile are written as well. */
static void tiled(float *const *y, const uint16_t *const *w, const uint16_t *packed, int64_t rows, int64_t in, int64_t ahead) {
    const int64_t tiles = (in + STEP - 1) / STEP, stride = in * sizeof(uint16_t);
    const uint16_t *second = rows > 16 ? packed + tiles * TILE_VALUES : packed; /* of nothing: any tile */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    for (; k + STEP <= in; k += STEP, packed += TILE_VALUES, second += TILE_VALUES) {
        if (ahead)
            for (int o = 0; o < LANES; o++) {
                __builtin_prefetch(w[0] + o * in + k + ahead);
                __builtin_prefetch(w[1] + o * in + k + ahead);
            }
        MULTIPLY_TILES(w[0] + k, w[1] + k, stride, packed, second);
    }
    if (k < in) { /* zeros, since what follows in memory may be NaN */
        uint16_t rest[2][LANES][STEP] __attribute__((aligned(64))) = {{{0}}};
        for (int half = 0; half < 2; half++)
            for (int o = 0; o < LANES; o++) memcpy(rest[half][o], w[half] + o * in + k, (in - k) * sizeof **w);
        __asm__ volatile("" : : "r"(rest) : "memory");
        MULTIPLY_TILES(rest[0], rest[1], 64, packed, second);
    }
    f16 sums[4][LANES] __attribute__((aligned(64))); /* outputs by rows */
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (int i = 0; i < 4; i++) {
        if (i % 2 && rows <= 16) continue;
        transpose(sums[i]);
        memcpy(y[i / 2] + i % 2 * LANES * LANES, sums[i], sizeof sums[i]);
    }
}

#else

int64_t request_tiles(void) { return 0; }

static int64_t rows_packed(int64_t in) { return (void)in, ROWS; }

static int64_t packed_bytes(int64_t rows, int64_t in) { return (void)rows, (void)in, 0; }

static void begin(Worker *worker, int64_t rows, int64_t bytes) { (void)rows, (void)bytes, worker->packed = 0; }

static void end(Worker *worker) { (void)worker; }

#endif

/* y [rows, LANES] = x times outputs first .. first + LANES; those past the last are 0. */
static void panel(float *y, const Linear *linear, const uint16_t *x, int64_t rows, int64_t first, int64_t ahead) {
    const int64_t in = linear->in, outs = linear->out - first;
    const uint16_t *w = linear->weight + first * in;
    if (outs < LANES) {
        memset(y, 0, rows * LANES * sizeof *y);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < outs; o++) {
                f16 acc = {0};
                int64_t k = 0;
                for (; k + STEP <= in; k += STEP) acc = dot(acc, w + o * in + k, x + r * in + k);
                uint16_t weights[STEP] = {0}, values[STEP] = {0};
                memcpy(weights, w + o * in + k, (in - k) * sizeof *w);
                memcpy(values, x + r * in + k, (in - k) * sizeof *x);
                y[r * LANES + o] = sum(dot(acc, weights, values));
            }
    } else {
        const int64_t quads = rows & ~3;
        if (quads)
            for (int o = 0; o < LANES; o += 4)
                for (int64_t r = 0; r < quads; r += 4) tile_4x4(y + r * LANES + o, w + o * in, x + r * in, in, r ? 0 : ahead);
        int64_t r = quads;
        if (rows - r >= 2) {
            for (int o = 0; o < LANES; o += 8) tile_2x8(y + r * LANES + o, w + o * in, x + r * in, in, r ? 0 : ahead);
            r += 2;
        }
        if (r < rows) tile_1x16(y + r * LANES, w, x + r * in, in, r ? 0 : ahead);
    }
}

static void add_bias(float *y, const Linear *linear, int64_t rows, int64_t first) {
    for (int64_t o = 0; o < linear->out - first && o < LANES; o++) {
        const uint32_t bits = (uint32_t)linear->bias[first + o] << 16;
        float bias;
        memcpy(&bias, &bits, sizeof bias);
        for (int64_t r = 0; r < rows; r++) y[r * LANES + o] += bias;
    }
}

/* Rows `from` .. `from` + `rows` of x, at most ROWS, times the panels at outputs first[0] and first[1] (-1: none), into y[0] and y[1].
 * `ahead` elements on lie the weights wanted next. */
static void panels(float y[2][ROWS * LANES], const Linear *linear, const uint16_t *x, const uint16_t *packed, int64_t from,
                   int64_t rows, const int64_t first[2], int64_t ahead) {
    const int64_t in = linear->in;
    if (from) ahead = 0; /* the first rows have asked for them */
#ifdef AMX
    int done = 0;
    if (packed && first[0] + LANES <= linear->out) {
        done = first[1] + LANES <= linear->out ? 2 : 1; /* alone, a panel is multiplied twice */
        const int64_t other = done == 1 || first[1] < 0 ? first[0] : first[1];
        const uint16_t *w[2] = {linear->weight + first[0] * in, linear->weight + other * in};
        for (int64_t r = 0; r < rows; r += 32) {
            float *part[2] = {y[0] + r * LANES, y[1] + r * LANES};
            const uint16_t *tiles = packed + (from + r) / 16 * ((in + STEP - 1) / STEP) * TILE_VALUES;
            tiled(part, w, tiles, rows - r, in, r ? 0 : ahead);
        }
    }
#else
    const int done = 0;
    (void)packed;
#endif
    for (int i = done; i < 2; i++)
        if (first[i] >= 0) panel(y[i], linear, x + from * in, rows, first[i], ahead);
    for (int i = 0; i < 2 && linear->bias; i++)
        if (first[i] >= 0) add_bias(y[i], linear, rows, first[i]);
}

/* One row of a panel, rounded, into out; `residual`, unless NULL, is added before. Fewer than LANES at the end of a row. */
static inline void emit(uint16_t *out, f16 y, const uint16_t *residual, int64_t outs) {
    if (outs >= LANES) {
        if (residual) y += load(residual);
        store(out, y);
        return;
    }
    uint16_t some[LANES] = {0};
    if (residual) {
        memcpy(some, residual, outs * sizeof *some);
        y += load(some);
    }
    store(some, y);
    memcpy(out, some, outs * sizeof *some);
}

/* What becomes of the products: out = y (+ residual) rounded, y as it is, or silu(first half) * second half rounded. */
typedef enum { ROUNDED, WIDE, GATED } Kind;

typedef struct {
    Kind kind;
    void *out;
    const uint16_t *residual;
} Target;

/* Rows `from` .. `from` + `rows` of the panels at first[0], first[1] to their place. */
static void deliver(const Target *target, float y[2][ROWS * LANES], const Linear *linear, int64_t from, int64_t rows,
                    const int64_t first[2]) {
    if (target->kind == GATED) {
        uint16_t *out = (uint16_t *)target->out + from * (linear->out / 2) + first[0];
        for (int64_t r = 0; r < rows; r++) {
            const f16 gate = *(f16 *)(y[0] + r * LANES);
            store(out + r * (linear->out / 2), gate / (1.0f + vexp(-gate)) * *(f16 *)(y[1] + r * LANES));
        }
        return;
    }
    for (int i = 0; i < 2 && first[i] >= 0; i++) {
        const int64_t outs = linear->out - first[i];
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = (from + r) * linear->out + first[i];
            const float *row = y[i] + r * LANES;
            if (target->kind == WIDE)
                memcpy((float *)target->out + at, row, (outs < LANES ? outs : LANES) * sizeof *row);
            else
                emit((uint16_t *)target->out + at, *(const f16 *)row, target->residual ? target->residual + at : 0, outs);
        }
    }
}

/* The worker's share of x w^T + bias for x [rows, in], two panels at a time: neighbours, or a gate and its factor. */
static void product(const Target *target, const uint16_t *x, const Linear *linear, int64_t rows, const Worker *worker) {
    const int gated = target->kind == GATED;
    const int64_t in = linear->in, count = ((gated ? linear->out / 2 : linear->out) + LANES - 1) / LANES, advance = gated ? 1 : 2;
    const int64_t start = count * worker->mine / worker->threads, stop = count * (worker->mine + 1) / worker->threads;
    for (int64_t begun = 0, some; begun < rows; begun += some) {
        some = rows - begun < rows_packed(in) ? rows - begun : rows_packed(in);
#ifdef AMX
        if (worker->packed) pack(worker->packed, x + begun * in, some, in);
#endif
        for (int64_t p = start; p < stop; p += advance) {
            const int64_t second = gated ? linear->out / 2 + p * LANES : p + 1 < stop ? (p + 1) * LANES : -1;
            const int64_t first[2] = {p * LANES, second};
            for (int64_t from = 0; from < some; from += ROWS) {
                const int64_t here = some - from < ROWS ? some - from : ROWS;
                float y[2][ROWS * LANES] __attribute__((aligned(64)));
                panels(y, linear, x + begun * in, worker->packed, from, here, first, advance * LANES * in);
                deliver(target, y, linear, begun + from, here, first);
            }
        }
    }
}

static void spread(const Target *target, const uint16_t *x, const Linear *linear, int64_t rows, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t mine = 0; mine < threads; mine++) {
        Worker worker = {mine, threads, 0};
        begin(&worker, rows, packed_bytes(rows, linear->in));
        product(target, x, linear, rows, &worker);
        end(&worker);
    }
}

/* out [rows, outs] = x w^T + bias + residual, of which the last two may be NULL; residual may be out. */
void linear(uint16_t *out, const uint16_t *x, const uint16_t *weight, const uint16_t *bias, const uint16_t *residual, int64_t rows,
            int64_t in, int64_t outs, int64_t threads) {
    spread(&(Target){ROUNDED, out, residual}, x, &(Linear){weight, bias, in, outs}, rows, threads);
}

/* The same without residual in float32: logits, of which the best two would often be equal in bfloat16. */
void wide_linear(float *out, const uint16_t *x, const uint16_t *weight, const uint16_t *bias, int64_t rows, int64_t in, int64_t outs,
                 int64_t threads) {
    spread(&(Target){WIDE, out, 0}, x, &(Linear){weight, bias, in, outs}, rows, threads);
}

/* -- a whole step ------------------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint16_t *attention_norm, *qk_gain, *mlp_norm; /* qk_gain may be NULL */
    Linear qkv, output, gate_up, down;
    uint16_t *pool;
} Layer;

/* All layers for `rows` tokens, x [rows, D] their embeddings, overwritten, and the head for `outs` of them, at wanted [outs]: out
 * [outs, V] the logits in float32, hidden [outs, D] what the head saw. scratch: 16-bit room for rows * (D * threads + qkv.out +
 * max(output.in, down.in)). Between two barriers nobody writes what another thread reads: every thread norms all rows for itself, and
 * residual sums are written where the same thread has read them. */
void forward(float *out, uint16_t *hidden, uint16_t *x, uint16_t *scratch, const Layer *layers, const uint16_t *norm, const Linear *head,
             const int64_t *owner, const int64_t *table, const int64_t *context, const float *turn, const int64_t *wanted,
             int64_t num_layers, int64_t rows, int64_t outs, int64_t kv_heads, int64_t num_blocks, int64_t block_size, int64_t columns,
             float eps, int64_t threads) {
    const Step step = {owner, table, context, turn, kv_heads, num_blocks, block_size, columns, eps};
    const int64_t size = head->in, tasks = rows * kv_heads;
    uint16_t *qkv = scratch + rows * size * threads, *inner = qkv + rows * layers[0].qkv.out;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#ifdef _OPENMP
        const int64_t mine = omp_get_thread_num(), team = omp_get_num_threads();
#else
        const int64_t mine = 0, team = 1;
#endif
        uint16_t *normed = scratch + rows * size * mine;
        Worker worker = {mine, team, 0};
        const int64_t inputs[3] = {size, layers[0].output.in, layers[0].down.in};
        int64_t bytes = 0;
        for (int i = 0; i < 3; i++) bytes = packed_bytes(rows, inputs[i]) > bytes ? packed_bytes(rows, inputs[i]) : bytes;
        begin(&worker, rows, bytes);
        for (const Layer *layer = layers; layer < layers + num_layers; layer++) {
            rms_norm(normed, x, layer->attention_norm, rows, size, eps);
            product(&(Target){ROUNDED, qkv, 0}, normed, &layer->qkv, rows, &worker);
#pragma omp barrier
            for (int64_t task = mine; task < tasks; task += team) keep(qkv, layer->pool, layer->qk_gain, &step, task);
            if (owner) { /* tokens see others of this step */
#pragma omp barrier
            }
            for (int64_t task = mine; task < tasks; task += team) /* in turn: later tokens see more */
                attention(inner, qkv, layer->pool, layer->qk_gain, &step, task);
#pragma omp barrier
            product(&(Target){ROUNDED, x, x}, inner, &layer->output, rows, &worker);
#pragma omp barrier
            rms_norm(normed, x, layer->mlp_norm, rows, size, eps);
            product(&(Target){GATED, inner, 0}, normed, &layer->gate_up, rows, &worker);
#pragma omp barrier
            product(&(Target){ROUNDED, x, x}, inner, &layer->down, rows, &worker);
#pragma omp barrier
        }
        for (int64_t i = 0; i < outs; i++) rms_norm(normed + i * size, x + wanted[i] * size, norm, 1, size, eps);
        if (mine == 0 && outs) memcpy(hidden, normed, outs * size * sizeof *hidden);
        product(&(Target){WIDE, out, 0}, normed, head, outs, &worker);
        end(&worker);
    }
}
