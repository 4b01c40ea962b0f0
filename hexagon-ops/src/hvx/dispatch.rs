//! Compiles each kernel a second time for the vector instructions of this machine.

use super::Kernel;

/// Runs `kernel` as code for the widest vectors that this CPU has.
#[inline(always)]
#[cfg(target_arch = "x86_64")]
pub fn widest<K: Kernel>(kernel: K) -> K::Output {
    #[target_feature(enable = "avx2,fma,f16c,bmi2")]
    fn avx2<K: Kernel>(kernel: K) -> K::Output {
        kernel.run::<true>()
    }
    if is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi2")
    {
        // SAFETY: the four features were detected on this CPU.
        return unsafe { avx2(kernel) };
    }
    // Builds with debug assertions are tests, which no one runs on a CPU of before 2013: without this
    // form they compile much faster.
    #[cfg(debug_assertions)]
    panic!("a build with debug assertions needs a CPU with AVX2, FMA, F16C and BMI2");
    #[cfg(not(debug_assertions))]
    kernel.run::<false>()
}

/// Runs `kernel`: the vectors of this architecture need no detection (NEON is part of AArch64).
#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
pub fn widest<K: Kernel>(kernel: K) -> K::Output {
    kernel.run::<true>()
}
