//! The loss of packing: the difference between quantized weights and their originals.

/// Sums of squares over weights, for the relative error of packing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SquaredLoss {
    /// Sum over the differences.
    pub lost: f64,
    /// Sum over the weights.
    pub weights: f64,
}

impl std::ops::Add for SquaredLoss {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            lost: self.lost + other.lost,
            weights: self.weights + other.weights,
        }
    }
}

impl SquaredLoss {
    /// Adds up two rows.
    pub fn add_row(&mut self, want: &[f32], have: &[f32]) {
        for (want, have) in want.iter().zip(have) {
            let (want, have) = (f64::from(*want), f64::from(*have));
            self.lost += (want - have).powi(2);
            self.weights += want.powi(2);
        }
    }

    /// Returns the relative loss, which is 0 for zeros that stay zero. It is not finite if weights
    /// became infinite, or if zeros became other numbers.
    #[must_use]
    pub fn relative(&self) -> f64 {
        match (self.lost, self.weights) {
            (0.0, 0.0) => 0.0,
            (lost, weights) => lost / weights,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_zeros_that_were_kept_lose_nothing_of_nothing() {
        let relative = |want: &[f32], have: &[f32]| {
            let mut loss = SquaredLoss::default();
            loss.add_row(want, have);
            loss.relative()
        };
        assert_eq!(relative(&[0.0, 0.0], &[0.0, 0.0]), 0.0);
        assert_eq!(relative(&[3.0, 4.0], &[3.0, 3.0]), 0.04);
        assert_eq!(relative(&[131_072.0], &[f32::INFINITY]), f64::INFINITY);
        assert_eq!(relative(&[0.0], &[1.0]), f64::INFINITY);
        assert!(relative(&[f32::NAN], &[0.0]).is_nan());
        assert!(relative(&[f32::INFINITY], &[f32::INFINITY]).is_nan());
    }
}
