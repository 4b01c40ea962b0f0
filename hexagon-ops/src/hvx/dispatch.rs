//! Compiles kernels for vector instructions that the rest of the library cannot count on.

use super::Kernel;

/// Returns the instructions that a simulated DSP needs and this CPU lacks, if it lacks any.
#[must_use]
pub fn missing_instructions() -> Option<&'static str> {
    #[cfg(target_arch = "x86_64")]
    if !is_x86_feature_detected!("avx2")
        || !is_x86_feature_detected!("fma")
        || !is_x86_feature_detected!("f16c")
        || !is_x86_feature_detected!("bmi2")
    {
        return Some("AVX2, FMA, F16C and BMI2");
    }
    None
}

/// Runs `kernel` as code for AVX2.
///
/// # Panics
/// On a CPU without it, unless `K::ANY_CPU`: a second form of each kernel would double the time of
/// compiling this crate, and a simulated DSP does not start there ([`missing_instructions`]).
#[inline(always)]
#[cfg(target_arch = "x86_64")]
pub fn widest<K: Kernel>(kernel: K) -> K::Output {
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    fn avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run()
    }
    match missing_instructions() {
        // SAFETY: the four features were detected on this CPU.
        None => unsafe { avx2(kernel) },
        Some(_) if K::ANY_CPU => kernel.run(),
        Some(missing) => panic!("a kernel of the DSP needs a CPU with {missing}"),
    }
}

/// Runs `kernel`: the vectors of this architecture need no detection (NEON is part of AArch64).
#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
pub fn widest<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
