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
        /* Adding 0.5 puts the last bit of a subnormal f16 at the last bit of the sum. */
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

/* What a register shows in place of a qfloat value in the strict mode: NaN, both as f32 and as f16. */
static inline uint32_t hvxfp_mark(uint32_t serial)
{
    return (0x7f80 | ((serial >> 7) & 0x7f)) << 16 | 0x7f80 | (serial & 0x7f);
}

/* The number of the register of an operand, `half` of a pair. */
static inline int hvxfp_register(CPUHexagonState *env, int operand, int half)
{
    return ((env->qfloat_registers >> (8 * operand)) & 31) ^ half;
}

/* Which of a register's last two qfloat values operand 1 or 2 (`half` of a pair) is, if the register shows `shown`; -1 if it is
 * neither. */
static inline int hvxfp_age(CPUHexagonState *env, int operand, int half, const MMVector *shown)
{
    int number = hvxfp_register(env, operand, half);
    for (int age = 0; age < 2; age++) {
        uint32_t mark = hvxfp_mark(env->qfloat[number][age].serial);
        bool is_kept = env->qfloat[number][age].serial != 0;
        for (int i = 0; i < 32; i++) {
            is_kept &= shown->uw[i] == mark;
        }
        if (is_kept) {
            return age;
        }
    }
    return -1;
}

/* The qfloat value of an operand. */
static inline const MMVector *hvxfp_in(CPUHexagonState *env, int operand, int half, const MMVector *shown)
{
    static const MMVector nan = { .uw = { [0 ... 31] = 0x7fff7fff } };
    if (likely(!hvxfp_strict)) {
        return shown;
    }
    int age = hvxfp_age(env, operand, half, shown);
    return age < 0 ? &nan : &env->qfloat[hvxfp_register(env, operand, half)][age].value;
}

/* Stores the qfloat result that was written to `to`, `half` of a pair. */
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

/*
 * Values with exponents. SOURCE of every rule: docs/internals/normalization.md.
 */

/* Bits below the point of a significand, and the smallest and largest exponent, of a format of `size` bits. */
static inline int hvxfp_bits(int size)
{
    return size == 32 ? 23 : 10;
}

static inline int hvxfp_least(int size)
{
    return hvxfp_rules == 73 ? (size == 32 ? -127 : -15) : size == 32 ? -255 : -15;
}

static inline int hvxfp_most(int size)
{
    return hvxfp_rules == 73 ? (size == 32 ? 128 : 16) : size == 32 ? 256 : 16;
}

/* The neighbour of `x` in the direction of `rest`, so that half a unit is not a tie. */
static inline double hvxfp_beside(double x, int rest)
{
    uint64_t bits;
    memcpy(&bits, &x, 8);
    if (rest && x != 0) {
        bits += (rest > 0) == (x > 0) ? 1 : -1;
    }
    memcpy(&x, &bits, 8);
    return x;
}

static inline int hvxfp_sign(double x)
{
    return (x > 0) - (x < 0);
}

static inline double hvxfp_power(int exponent)
{
    return __builtin_ldexp(1.0, exponent);
}

/* Rounds `exact` + `low`, which is small, to a significand with `exponent`. */
static inline HvxNum hvxfp_round(double exact, double low, int exponent, int size)
{
    int bits = hvxfp_bits(size), least = hvxfp_least(size), most = hvxfp_most(size);
    if (!__builtin_isfinite(exact)) {
        return (HvxNum){ exact, most, 0 };
    }
    double x = hvxfp_beside(exact, hvxfp_sign(low));
    if (hvxfp_rules == 73) {
        /* A significand is an odd multiple of its last bit; there is no zero. */
        double tiny = hvxfp_power(least - bits);
        if (exact == 0 && low == 0) {
            return (HvxNum){ tiny, least, 0 };
        }
        bool is_over = __builtin_fabs(x) >= hvxfp_power(exponent + 1) && x != -hvxfp_power(exponent + 1);
        if (exponent > most || (is_over && exponent == most)) {
            return (HvxNum){ __builtin_copysign(hvxfp_power(most + 1) - hvxfp_power(most - bits), x), most, 0 };
        }
        if (exponent < least - 1) {
            return (HvxNum){ __builtin_copysign(tiny, x), least, 0 };
        }
        bool is_halved = is_over || exponent == least - 1;
        exponent += is_halved;
        double units = x / hvxfp_power(exponent - bits), fours = 4 * __builtin_floor(units / 4), rest = units - fours;
        if (is_halved || exponent == most) {
            units = fours + (rest <= 2 ? 1 : 3);
        } else if (rest > 1.5 && rest <= 2.5) {
            units = fours / 2 + 1;
            exponent += 1;
        } else {
            units = fours + (rest <= 1.5 ? 1 : 3);
        }
        return (HvxNum){ units * hvxfp_power(exponent - bits), exponent, 0 };
    }
    if (x == 0) {
        return (HvxNum){ exact, least, 0 };
    }
    exponent += __builtin_fabs(x) >= hvxfp_power(exponent + 1);
    if (exponent > most || (exponent == most && __builtin_fabs(x) > hvxfp_power(most))) {
        return (HvxNum){ __builtin_copysign(__builtin_inf(), x), most, 0 };
    }
    if (exponent < least) {
        return (HvxNum){ __builtin_copysign(0.0, x), least, 0 };
    }
    double unit = hvxfp_power(exponent - bits), rounded = __builtin_rint(x / unit) * unit;
    return (HvxNum){ rounded, exponent, size == 32 ? hvxfp_sign(x - rounded) : 0 };
}

/* An f32 or f16: a subnormal one keeps the exponent of the smallest normal one. Before V79 there is neither NaN nor
 * infinity. */
static inline HvxNum hvxfp_num_sf(uint32_t x)
{
    int field = (x >> 23) & 255;
    double value = hvxfp_sf(x);
    if (field == 255 && hvxfp_rules == 73) {
        value = __builtin_copysign(hvxfp_sf(0x3f800000 | (x & 0x7fffff)) * hvxfp_power(128), x >> 31 ? -1 : 1);
    }
    return (HvxNum){ value, (field ? field : 1) - 127, 0 };
}

static inline HvxNum hvxfp_num_hf(uint16_t x)
{
    int field = (x >> 10) & 31;
    double value = hvxfp_hf(x);
    if (field == 31 && hvxfp_rules == 73) {
        value = __builtin_copysign((1 + (x & 0x3ff) * 0x1p-10) * 0x1p16, x >> 15 ? -1 : 1);
    }
    return (HvxNum){ value, (field ? field : 1) - 15, 0 };
}

static inline uint32_t hvxfp_num_to_sf(HvxNum a)
{
    return hvxfp_us((float)hvxfp_beside(a.value, a.rest));
}

static inline uint16_t hvxfp_num_to_hf(HvxNum a)
{
    double x = hvxfp_beside(a.value, a.rest);
    if (x != 0 && __builtin_isfinite(x)) {
        int exponent = __builtin_ilogb(x);
        double unit = hvxfp_power((exponent < -14 ? -14 : exponent) - 10);
        x = __builtin_rint(x / unit) * unit;
    }
    return hvxfp_uh((float)x);
}

/* The sum gets the exponent of the larger operand after normalizing it, but at least the other operand's exponent. On V79 and
 * later it is one less if the signs differ. */
static inline HvxNum hvxfp_add(HvxNum a, HvxNum b, int size)
{
    HvxNum high = a.exponent > b.exponent ? a : b, low = a.exponent > b.exponent ? b : a;
    int exponent = low.exponent;
    if (high.value != 0 && __builtin_isfinite(high.value)) {
        int is_less = hvxfp_rules != 73 && __builtin_signbit(a.value) != __builtin_signbit(b.value);
        int normal = __builtin_ilogb(high.value) - is_less;
        exponent = normal > exponent ? normal : exponent;
    }
    double sum = a.value + b.value, of_b = sum - a.value;
    double lost = __builtin_isfinite(sum) ? (a.value - (sum - of_b)) + (b.value - of_b) : 0;
    return hvxfp_round(sum, lost, exponent, size);
}

static inline HvxNum hvxfp_mul(HvxNum a, HvxNum b, int size)
{
    return hvxfp_round(a.value * b.value, 0, a.exponent + b.exponent, size);
}

static inline HvxNum hvxfp_negate(HvxNum a)
{
    return (HvxNum){ -a.value, a.exponent, -a.rest };
}

static inline HvxNum hvxfp_abs(HvxNum a)
{
    return a.value < 0 ? hvxfp_negate(a) : a;
}

/* The number, normalized to its natural exponent. */
static inline HvxNum hvxfp_normal(HvxNum a, int size)
{
    if (a.value != 0 && __builtin_isfinite(a.value)) {
        int exponent = __builtin_ilogb(a.value);
        a.exponent = exponent < hvxfp_least(size) ? hvxfp_least(size) : exponent;
    }
    return a;
}

/* The numbers of an operand, found as in hvxfp_in. */
static inline const HvxNum *hvxfp_num_in(CPUHexagonState *env, int operand, int half, const MMVector *shown)
{
    static const HvxNum nan[64] = { [0 ... 63] = { __builtin_nan(""), 0, 0 } };
    int age = hvxfp_age(env, operand, half, shown);
    return age < 0 ? nan : env->qfloat[hvxfp_register(env, operand, half)][age].num;
}

/* Stores the numbers of a result. */
static inline void hvxfp_num_out(CPUHexagonState *env, int half, MMVector *to, const HvxNum *num)
{
    int number = (env->qfloat_registers & 31) ^ half;
    hvxfp_out(env, half, to);
    memcpy(env->qfloat[number][0].num, num, sizeof env->qfloat[number][0].num);
}

