/* HVX floating point: host arithmetic on lanes, and qfloat values of the strict mode (hvx_float.py). */

static inline float hvxfp_sf(uint32_t x)
{
    float f;
    memcpy(&f, &x, 4);
    return f;
}

static inline uint32_t hvxfp_us(float f)
{
    uint32_t x;
    memcpy(&x, &f, 4);
    return x;
}

static inline float hvxfp_hf(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) {
        return hvxfp_sf(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    }
    /* Exact; subnormals become normal. */
    return hvxfp_sf(hvxfp_us(hvxfp_sf(magnitude << 13) * 0x1p112f) | sign);
}

static inline uint16_t hvxfp_uh(float f)
{
    uint32_t x = hvxfp_us(f), sign = (x >> 16) & 0x8000, magnitude = x & 0x7fffffff;
    if (magnitude >= 0x47800000) {
        return sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00);
    }
    if (magnitude < 0x38800000) {
        /* The last bit of a subnormal f16 is the last bit of the sum. */
        return sign | (hvxfp_us(hvxfp_sf(magnitude) + 0.5f) - 0x3f000000);
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1);
    return sign | (magnitude - 0x38000000) >> 13;
}

static inline int16_t hvxfp_h(float f)
{
    return f != f ? 0x7fff : f >= 32767.f ? 32767 : f <= -32768.f ? -32768 : (int16_t)f;
}

static inline int32_t hvxfp_w(float f)
{
    return f != f || f >= 2147483648.f ? 0x7fffffff : f < -2147483648.f ? INT32_MIN : (int32_t)f;
}

/* What a register shows of a qfloat value in the strict mode: NaN as f32 and as f16. */
static inline uint32_t hvxfp_mark(uint32_t serial)
{
    return (0x7f80 | ((serial >> 7) & 0x7f)) << 16 | 0x7f80 | (serial & 0x7f);
}

/* The qfloat value of an operand (1 or 2), `half` of a pair, whose register shows `shown`. */
static inline const MMVector *hvxfp_in(CPUHexagonState *env, int operand, int half, const MMVector *shown)
{
    static const MMVector nan = { .uw = { [0 ... 31] = 0x7fff7fff } };
    if (likely(!hvxfp_strict)) {
        return shown;
    }
    int number = ((env->qfloat_registers >> (8 * operand)) & 31) ^ half;
    for (int age = 0; age < 2; age++) {
        uint32_t mark = hvxfp_mark(env->qfloat[number][age].serial);
        bool is_kept = env->qfloat[number][age].serial != 0;
        for (int i = 0; i < 32; i++) {
            is_kept &= shown->uw[i] == mark;
        }
        if (is_kept) {
            return &env->qfloat[number][age].value;
        }
    }
    return &nan;
}

/* Keeps the qfloat result that has been written to `to`, `half` of a pair. */
static inline void hvxfp_out(CPUHexagonState *env, int half, MMVector *to)
{
    if (likely(!hvxfp_strict)) {
        return;
    }
    int number = (env->qfloat_registers & 31) ^ half;
    env->qfloat[number][1] = env->qfloat[number][0];
    env->qfloat[number][0].serial = ++env->qfloat_serial;
    env->qfloat[number][0].value = *to;
    for (int i = 0; i < 32; i++) {
        to->uw[i] = hvxfp_mark(env->qfloat_serial);
    }
}

