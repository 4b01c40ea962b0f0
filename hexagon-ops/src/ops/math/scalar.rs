//! Functions of one f64, for the few numbers that a command's parameters need: powers and
//! logarithms to 1e-14.

use core::f64::consts::{LN_2, LOG2_E, SQRT_2};

/// `1 / (2 i + 1)`, as a table, because a division costs 80 packets on the DSP.
const ODD_INVERSES: [f64; 9] = {
    let mut inverses = [1.0; 9];
    let (mut i, mut odd) = (0, 1.0);
    while i < inverses.len() {
        inverses[i] = 1.0 / odd;
        (i, odd) = (i + 1, odd + 2.0);
    }
    inverses
};
/// `1 / (i + 1)`.
const INVERSES: [f64; 17] = {
    let mut inverses = [1.0; 17];
    let (mut i, mut k) = (0, 1.0);
    while i < inverses.len() {
        inverses[i] = 1.0 / k;
        (i, k) = (i + 1, k + 1.0);
    }
    inverses
};

/// Returns the natural logarithm of a positive normal number.
#[must_use]
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = f64::from(u16::try_from(bits >> 52 & 0x7ff).unwrap_or(0)) - 1023.0;
    let mut fraction = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    if fraction > SQRT_2 {
        fraction /= 2.0;
        exponent += 1.0;
    }
    // ln f = 2 artanh((f - 1) / (f + 1)), |argument| <= 0.172.
    let t = (fraction - 1.0) / (fraction + 1.0);
    let (square, mut power, mut sum) = (t * t, t, 0.0);
    for inverse in ODD_INVERSES {
        sum += power * inverse;
        power *= square;
    }
    exponent * LN_2 + 2.0 * sum
}

/// Returns `e^x` for results that are normal numbers; 0 below and the largest number above.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the argument is bounded, and the exponent is positive then"
)]
pub fn exp(x: f64) -> f64 {
    if x < -708.0 {
        return 0.0;
    }
    let x = x.min(709.0);
    let n = (x * LOG2_E + if x < 0.0 { -0.5 } else { 0.5 }) as i64;
    let r = x - n as f64 * LN_2;
    let (mut term, mut sum) = (1.0, 1.0);
    for inverse in INVERSES {
        term *= r * inverse;
        sum += term;
    }
    sum * f64::from_bits(((n + 1023) as u64) << 52)
}

/// Returns `base^exponent` for a positive base.
#[must_use]
pub fn power(base: f64, exponent: f64) -> f64 {
    exp(exponent * ln(base))
}

/// Returns the largest whole number not above `x`.
#[must_use]
#[expect(
    clippy::cast_possible_truncation,
    reason = "saturates, and numbers that large are whole already"
)]
pub fn floor(x: f64) -> f64 {
    let whole = x as i64 as f64;
    if whole > x { whole - 1.0 } else { whole }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_and_powers_are_those_of_the_standard_library() {
        for i in 1..2000 {
            let x = f64::from(i) * 0.37;
            assert!(
                (ln(x) - x.ln()).abs() < 1e-13 * x.ln().abs().max(1.0),
                "{x}"
            );
            let y = x - 300.0;
            assert!((exp(y) / y.exp() - 1.0).abs() < 1e-12, "{y}");
            assert_eq!(floor(y), y.floor());
        }
        assert!((power(10000.0, -2.0 / 128.0) - 10000_f64.powf(-2.0 / 128.0)).abs() < 1e-13);
    }
}
