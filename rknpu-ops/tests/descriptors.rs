//! An allocation of the stand-in needs a file descriptor, and fails when the process has none left.
//! This is a separate program, because the limit applies to the whole process.
#![expect(unsafe_code, reason = "the functions under test are C functions")]
#![expect(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "as in tests/sim"
)]

#[path = "sim/common.rs"]
#[expect(dead_code, reason = "written for tests/sim")]
mod common;

use rknpu_ops::ffi::MatmulType;
use rknpu_ops::layout::Soc;

use self::common::{Mem, Npu, info};

#[test]
fn an_allocation_takes_a_descriptor_and_fails_without_one() {
    rlimit::setrlimit(rlimit::Resource::NOFILE, 64, 64).unwrap();
    let npu = Npu::new(Soc::Rk3588);
    let (ctx, _) = npu
        .create(info(MatmulType::I8_I8_I32, [1, 32, 32]))
        .unwrap();
    let mems: Vec<Mem> = std::iter::from_fn(|| npu.mem(ctx, 4096))
        .take(100)
        .collect();
    assert!((20..64).contains(&mems.len()), "{}", mems.len());
    // Views need no descriptor.
    assert!(npu.view(ctx, mems[0], 64, 0).is_some());
    assert!(npu.mem(ctx, 4096).is_none());
    assert_eq!(npu.destroy_mem(ctx, mems[1]), 0);
    assert!(npu.mem(ctx, 4096).is_some());
}
