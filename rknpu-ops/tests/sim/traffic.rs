//! Calls during runs, results in memory that was not cleaned, and machines whose kernel has known
//! faults.

use std::time::Duration;

use rknpu_ops::ffi::{MatmulCtx, MatmulType, MemSync};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::{Coherence, Options, POISON};

use crate::common::{Mem, Npu, Problem};

const I8: MatmulType = MatmulType::I8_I8_I32;

fn with(change: impl FnOnce(&mut Options)) -> Npu {
    let mut options = Options::new(Soc::Rk3588);
    change(&mut options);
    Npu::with(options)
}

fn problem(seed: u64) -> Problem {
    Problem::random(Soc::Rk3588, I8, [2, 64, 32], seed)
}

/// A context with A and B written and all three bound; C is as the library made it.
fn bound(npu: &Npu, problem: &Problem) -> (MatmulCtx, [Mem; 3]) {
    let (ctx, attr) = npu.create(problem.info).unwrap();
    let mems = [attr.a, attr.b, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    for (mem, bytes) in mems.iter().zip([problem.a_bytes(), problem.b_bytes()]) {
        mem.write(&bytes);
        assert_eq!(npu.sync(ctx, *mem, MemSync::TO_DEVICE), 0);
    }
    for (mem, attr) in mems.iter().zip([attr.a, attr.b, attr.c]) {
        assert_eq!(npu.set(ctx, *mem, attr), 0);
    }
    (ctx, mems)
}

/// Calls `during` while a run of `ctx` is under way, and returns its result.
fn during_a_run<T>(npu: &Npu, ctx: MatmulCtx, during: impl FnOnce() -> T) -> T {
    let before = npu.machine.calls("rknn_matmul_run");
    std::thread::scope(|scope| {
        scope.spawn(|| npu.run(ctx));
        while npu.machine.calls("rknn_matmul_run") == before {
            std::thread::yield_now();
        }
        // A call counts as soon as it begins.
        std::thread::sleep(Duration::from_millis(50));
        during()
    })
}

#[test]
fn a_call_that_is_no_run_locks_the_machine_up_during_one() {
    type Call = fn(&Npu, &Problem, MatmulCtx, [Mem; 3]) -> bool;
    let calls: [(&str, Call); 7] = [
        ("rknn_matmul_create", |npu, problem, _, _| {
            npu.create(problem.info).is_err()
        }),
        ("rknn_matmul_destroy", |npu, _, ctx, _| {
            npu.destroy(ctx) == -1
        }),
        ("rknn_matmul_set_io_mem", |npu, problem, ctx, [a, ..]| {
            let mut attr = rknpu_ops::ffi::TensorAttr::ZERO;
            attr.name[0] = std::ffi::c_char::from_ne_bytes(*b"A");
            attr.size = u32::try_from(problem.a_bytes().len()).unwrap();
            npu.set(ctx, a, attr) == -1
        }),
        ("rknn_create_mem", |npu, _, ctx, _| {
            npu.mem(ctx, 64).is_none()
        }),
        ("rknn_create_mem_from_fd", |npu, _, ctx, [a, ..]| {
            npu.view(ctx, a, 32, 0).is_none()
        }),
        ("rknn_destroy_mem", |npu, _, ctx, [a, ..]| {
            npu.destroy_mem(ctx, a) == -1
        }),
        ("rknn_mem_sync", |npu, _, ctx, [_, _, c]| {
            npu.sync(ctx, c, MemSync::FROM_DEVICE) == -1
        }),
    ];
    for (symbol, call) in calls {
        let npu = with(|options| options.run_time = Duration::from_millis(400));
        let problem = problem(1);
        let (ctx, mems) = bound(&npu, &problem);
        // Another context than the one that runs, so that the rule of the whole machine is tested.
        let (other, _) = bound(&npu, &problem);
        assert_eq!(npu.machine.locked_up(), None);
        assert!(
            during_a_run(&npu, ctx, || call(&npu, &problem, other, mems)),
            "{symbol}"
        );
        let reason = npu.machine.locked_up().unwrap();
        assert!(reason.contains(symbol), "{symbol}: {reason}");
        assert_eq!([npu.run(ctx), npu.run(other)], [-1; 2], "{symbol}");
    }
}

#[test]
fn a_run_beside_another_one_is_none_of_these() {
    let npu = with(|options| options.run_time = Duration::from_millis(200));
    let (first, second) = (problem(1), problem(2));
    let [(one, _), (two, [_, _, c])] = [&first, &second].map(|problem| bound(&npu, problem));
    npu.clean(two, c);
    assert_eq!(during_a_run(&npu, one, || npu.run(two)), 0);
    second.check(&c.read(), "beside");
    assert_eq!(npu.machine.locked_up(), None);
}

#[test]
fn results_are_poison_in_memory_that_was_never_cleaned() {
    for coherence in [Coherence::Relaxed, Coherence::Strict] {
        let npu = with(|options| options.coherence = coherence);
        let problem = problem(3);
        let (ctx, [_, _, c]) = bound(&npu, &problem);
        let result = || {
            assert_eq!(npu.run(ctx), 0);
            assert_eq!(npu.sync(ctx, c, MemSync::FROM_DEVICE), 0);
            c.read()
        };
        assert!(result().iter().all(|byte| *byte == POISON), "{coherence:?}");
        npu.clean(ctx, c);
        for _ in 0..2 {
            problem.check(&result(), "cleaned");
        }
    }
}

#[test]
fn results_are_poison_where_the_cpu_wrote() {
    let npu = with(|options| options.coherence = Coherence::Strict);
    let problem = problem(4);
    let (ctx, [_, _, c]) = bound(&npu, &problem);
    npu.clean(ctx, c);
    let result = || {
        assert_eq!(npu.run(ctx), 0);
        assert_eq!(npu.sync(ctx, c, MemSync::FROM_DEVICE), 0);
        c.read()
    };
    problem.check(&result(), "clean");
    let mut bytes = c.read();
    bytes[7] ^= 1;
    c.write(&bytes);
    assert!(result().iter().all(|byte| *byte == POISON));
    // The sync also writes back the CPU's changes.
    c.write(&bytes);
    npu.clean(ctx, c);
    problem.check(&result(), "cleaned again");
}

#[test]
fn spaces_that_share_their_addresses_hold_four_gibibytes_together() {
    let npu = with(|options| options.one_address_space = true);
    let mut info = problem(5).info;
    let mut taken = 0;
    for domain in 0..3 {
        info.iommu_domain_id = domain;
        let (ctx, _) = npu.create(info).unwrap();
        taken += u32::from(npu.mem(ctx, 7 << 28).is_some());
    }
    assert_eq!(taken, 2);
}

#[test]
fn a_driver_that_loses_addresses_has_none_for_memory_that_was_freed() {
    let npu = with(|options| options.loses_addresses = true);
    let (ctx, _) = npu.create(problem(8).info).unwrap();
    let large = npu.mem(ctx, 0x7000_0000).unwrap();
    assert_eq!(npu.destroy_mem(ctx, large), 0);
    assert!(npu.mem(ctx, 0x7000_0000).is_none());
    assert!(npu.mem(ctx, 0x0100_0000).is_some());
}

#[test]
fn mixed_views_read_from_the_start_beside_another_run_only() {
    let npu = with(|options| {
        options.mixed_views = true;
        options.run_time = Duration::from_millis(200);
    });
    let (first, second) = (problem(6), problem(7));
    let (one, _) = bound(&npu, &first);
    let (ctx, attr) = npu.create(second.info).unwrap();
    let [a, c] = [attr.a, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    let parent = npu.mem(ctx, 4 * attr.b.size).unwrap();
    let b = npu
        .view(
            ctx,
            parent,
            attr.b.size,
            i32::try_from(attr.b.size).unwrap(),
        )
        .unwrap();
    a.write(&second.a_bytes());
    b.write(&second.b_bytes());
    npu.clean(ctx, c);
    for (mem, attr) in [(a, attr.a), (b, attr.b), (c, attr.c)] {
        assert_eq!(npu.set(ctx, mem, attr), 0);
    }
    assert_eq!(npu.run(ctx), 0);
    second.check(&c.read(), "alone");
    assert_eq!(during_a_run(&npu, one, || npu.run(ctx)), 0);
    assert!(
        c.read().iter().all(|byte| *byte == 0),
        "the start of the memory is zeros"
    );
}
