//! The loss of packing: what quantized weights differ from those that they were made of.

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

    /// Returns the relative loss; 0 for weights that are all 0, and for some that are not finite.
    #[must_use]
    pub fn relative(&self) -> f64 {
        let part = self.lost / self.weights;
        if part.is_finite() { part } else { 0.0 }
    }
}
