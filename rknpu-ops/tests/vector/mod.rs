//! Vectors of FP32 numbers, measured in FP64.

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| f64::from(*a) * f64::from(*b))
        .sum()
}

pub fn norm(a: &[f32]) -> f64 {
    dot(a, a).sqrt()
}
