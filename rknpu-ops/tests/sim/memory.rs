//! Memory: copies at binding, views, coherence, I/O domains.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rknpu_ops::ffi::{IoAttr, Layout, MatmulCtx, MatmulType, MemSync, mem_flags};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::{Coherence, Options, POISON};

use crate::common::{Mem, Npu, Problem, info};

const I8: MatmulType = MatmulType::I8_I8_I32;

fn problem(seed: u64) -> Problem {
    Problem::random(Soc::Rk3588, I8, [2, 64, 32], seed)
}

fn strict() -> Npu {
    let mut options = Options::new(Soc::Rk3588);
    options.coherence = Coherence::Strict;
    Npu::with(options)
}

/// A context with memory for its three tensors, bound.
fn bound(npu: &Npu, problem: &Problem) -> (MatmulCtx, IoAttr, [Mem; 3]) {
    let (ctx, attr) = npu.create(problem.info).unwrap();
    let mems = [attr.a, attr.b, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    for (mem, attr) in mems.iter().zip([attr.a, attr.b, attr.c]) {
        assert_eq!(npu.set(ctx, *mem, attr), 0);
    }
    npu.clean(ctx, mems[2]);
    (ctx, attr, mems)
}

#[test]
fn operands_that_are_not_native_are_copied_when_they_are_bound() {
    let npu = Npu::new(Soc::Rk3588);
    let [mut old, mut new] = [1, 2].map(problem);
    for problem in [&mut old, &mut new] {
        problem.info.ac_layout = Layout::NORM;
        problem.info.b_layout = Layout::NORM;
    }
    let (ctx, attr, [a, b, c]) = bound(&npu, &old);
    let write = |problem: &Problem| {
        a.write(&problem.a_bytes());
        b.write(&problem.b_bytes());
    };
    write(&old);
    assert_eq!(npu.set(ctx, a, attr.a) | npu.set(ctx, b, attr.b), 0);
    write(&new);
    assert_eq!(npu.run(ctx), 0);
    old.check(&c.read(), "written after binding");
    assert_eq!(npu.set(ctx, a, attr.a) | npu.set(ctx, b, attr.b), 0);
    assert_eq!(npu.run(ctx), 0);
    new.check(&c.read(), "bound again");
}

#[test]
fn native_operands_are_read_by_each_run() {
    let npu = Npu::new(Soc::Rk3588);
    let (ctx, _, [a, b, c]) = bound(&npu, &problem(1));
    for seed in [1, 2] {
        let problem = problem(seed);
        a.write(&problem.a_bytes());
        b.write(&problem.b_bytes());
        assert_eq!(npu.run(ctx), 0);
        problem.check(&c.read(), "native");
    }
}

#[test]
fn strict_coherence_shows_missing_syncs() {
    let npu = strict();
    let problem = problem(3);
    let (ctx, _, [a, b, c]) = bound(&npu, &problem);
    let all_poison = |bytes: Vec<u8>| bytes.iter().all(|byte| *byte == POISON);
    assert!(all_poison(a.read()));
    a.write(&problem.a_bytes());
    b.write(&problem.b_bytes());
    assert_eq!(npu.sync(ctx, a, MemSync::TO_DEVICE), 0);
    // B was not synced, so the device multiplies with poison.
    assert_eq!(npu.run(ctx), 0);
    assert!(all_poison(c.read()));
    assert_eq!(npu.sync(ctx, c, MemSync::FROM_DEVICE), 0);
    assert_ne!(problem.have(&c.read(), 0, 0), problem.want(0, 0));
    // With every sync in place the result is right. After another run it is stale again.
    assert_eq!(npu.sync(ctx, b, MemSync::TO_DEVICE), 0);
    for _ in 0..2 {
        assert_eq!(npu.run(ctx), 0);
        assert!(all_poison(c.read()));
        assert_eq!(npu.sync(ctx, c, MemSync::FROM_DEVICE), 0);
        problem.check(&c.read(), "synced");
    }
}

#[test]
fn a_sync_through_a_view_does_nothing() {
    let npu = strict();
    let problem = problem(4);
    let (ctx, attr, [_, b, c]) = bound(&npu, &problem);
    b.write(&problem.b_bytes());
    assert_eq!(npu.sync(ctx, b, MemSync::TO_DEVICE), 0);
    let parent = npu.mem(ctx, 4096).unwrap();
    let view = npu.view(ctx, parent, attr.a.size, 256).unwrap();
    view.write(&problem.a_bytes());
    assert_eq!(npu.set(ctx, view, attr.a), 0);
    let run = || {
        assert_eq!(npu.run(ctx), 0);
        assert_eq!(npu.sync(ctx, c, MemSync::FROM_DEVICE), 0);
        problem.have(&c.read(), 1, 5) == problem.want(1, 5)
    };
    assert_eq!(npu.sync(ctx, view, MemSync::TO_DEVICE), 0);
    assert!(!run());
    assert_eq!(npu.sync(ctx, parent, MemSync::TO_DEVICE), 0);
    assert!(run());
}

#[test]
fn views_of_one_allocation_hold_all_operands() {
    for npu in [Npu::new(Soc::Rk3588), strict()] {
        let problem = problem(5);
        let (ctx, attr) = npu.create(problem.info).unwrap();
        let parent = npu.mem(ctx, 16384).unwrap();
        let place = [(attr.a, 16), (attr.b, 1024), (attr.c, 8192)];
        let views = place.map(|(attr, at)| npu.view(ctx, parent, attr.size, at).unwrap());
        let raw = views[1].raw();
        assert_eq!((raw.offset, raw.flags), (1024, mem_flags::FROM_FD));
        assert_eq!(
            (raw.virt_addr, raw.fd),
            (parent.raw().virt_addr, parent.raw().fd)
        );
        views[0].write(&problem.a_bytes());
        views[1].write(&problem.b_bytes());
        assert_eq!(npu.sync(ctx, parent, MemSync::TO_DEVICE), 0);
        for (view, (attr, _)) in views.iter().zip(place) {
            assert_eq!(npu.set(ctx, *view, attr), 0);
        }
        assert_eq!(npu.run(ctx), 0);
        assert_eq!(npu.sync(ctx, parent, MemSync::FROM_DEVICE), 0);
        problem.check(&views[2].read(), "views");
        // The views keep the memory and its descriptor alive.
        let fd = format!("/proc/self/fd/{}", raw.fd);
        assert_eq!(npu.destroy_mem(ctx, parent), 0);
        problem.check(&views[2].read(), "after the parent");
        assert!(
            std::fs::read_link(fd)
                .unwrap()
                .to_string_lossy()
                .contains("rknpu")
        );
        assert_eq!(npu.run(ctx), 0);
        for view in views {
            assert_eq!(npu.destroy_mem(ctx, view), 0);
        }
        assert_eq!(npu.machine.live().mems, 0);
    }
}

#[test]
fn views_that_do_not_fit_are_refused() {
    let npu = Npu::new(Soc::Rk3588);
    let (ctx, _) = npu.create(info(I8, [1, 32, 32])).unwrap();
    let parent = npu.mem(ctx, 4096).unwrap();
    for (size, offset) in [(4096, 16), (16, -16), (16, 8), (0, 0), (u32::MAX, 0)] {
        assert!(
            npu.view(ctx, parent, size, offset).is_none(),
            "{size} {offset}"
        );
    }
    let raw = parent.raw();
    let shifted = raw.virt_addr.wrapping_byte_add(64);
    for (fd, virt) in [
        (raw.fd, shifted),
        (raw.fd, std::ptr::null_mut()),
        (-1, raw.virt_addr),
    ] {
        // SAFETY: the library checks descriptor and address.
        let view = unsafe { (npu.api.create_mem_from_fd)(ctx, fd, virt, 64, 64) };
        assert!(view.is_null());
    }
}

#[test]
fn a_domain_takes_two_gib() {
    let npu = Npu::new(Soc::Rk3588);
    let in_domain = |domain| {
        let mut info = info(I8, [1, 32, 32]);
        info.iommu_domain_id = domain;
        npu.create(info).unwrap().0
    };
    let (zero, last, beyond) = (in_domain(0), in_domain(15), in_domain(16));
    let large = npu.mem(zero, 0x7000_0000).unwrap();
    assert!(npu.mem(zero, 0x1000_0000).is_none());
    let rest = npu.mem(zero, 0x0fff_f000).unwrap();
    assert!(npu.mem(zero, 1).is_none());
    assert!(npu.mem(last, 0x7000_0000).is_some());
    assert_eq!(npu.destroy_mem(zero, large), 0);
    assert!(npu.mem(zero, 0x7000_0000).is_some());
    assert_eq!(npu.destroy_mem(zero, rest), 0);
    // A domain that does not exist allocates nothing and runs nothing.
    assert!(npu.mem(beyond, 64).is_none());
    assert_eq!(npu.run(beyond), -1);
}

#[test]
fn memory_of_another_domain_cannot_be_bound() {
    let npu = Npu::new(Soc::Rk3588);
    let request = info(I8, [1, 32, 32]);
    let mut other = request;
    other.iommu_domain_id = 1;
    let (ctx, attr) = npu.create(request).unwrap();
    let (other, _) = npu.create(other).unwrap();
    let mem = npu.mem(other, attr.a.size).unwrap();
    assert_eq!(npu.set(ctx, mem, attr.a), -5);
    assert!(npu.view(ctx, mem, 32, 0).is_none());
}

#[test]
fn a_context_runs_once_at_a_time() {
    let npu = Npu::new(Soc::Rk3588);
    let problem = Problem::random(Soc::Rk3588, I8, [64, 1024, 256], 6);
    let (ctx, _, _) = bound(&npu, &problem);
    let refused = AtomicBool::new(false);
    until_two_meet(&refused, || match npu.run(ctx) {
        0 => {}
        code => {
            assert_eq!(code, -1);
            refused.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(npu.run(ctx), 0);
}

#[test]
fn a_thread_is_refused_while_another_one_is_in_the_library() {
    let npu = Npu::new(Soc::Rk3588);
    let problem = Problem::random(Soc::Rk3588, I8, [3, 96, 64], 6);
    let refused = AtomicBool::new(false);
    until_two_meet(&refused, || match npu.create(problem.info) {
        Ok((ctx, _)) => {
            while npu.destroy(ctx) != 0 {
                refused.store(true, Ordering::Relaxed);
            }
        }
        Err(_) => refused.store(true, Ordering::Relaxed),
    });
}

/// Calls `work` on two threads, again and again, until one of them has set `refused`. A busy
/// machine may run the threads one after the other for a while: they get a minute.
fn until_two_meet(refused: &AtomicBool, work: impl Fn() + Sync) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let repeat = || {
        while !refused.load(Ordering::Relaxed) && Instant::now() < deadline {
            work();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(repeat);
        scope.spawn(repeat);
    });
    assert!(
        refused.load(Ordering::Relaxed),
        "no call met another one within a minute"
    );
}

#[test]
fn contexts_run_side_by_side() {
    let npu = Npu::new(Soc::Rk3588);
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let npu = &npu;
            scope.spawn(move || {
                let problem = Problem::random(Soc::Rk3588, I8, [3, 96, 64], seed);
                for _ in 0..20 {
                    let (a, b) = (problem.a_bytes(), problem.b_bytes());
                    problem.check(&npu.multiply(problem.info, &a, &b).unwrap(), "side by side");
                }
            });
        }
    });
}

#[test]
fn without_compute_a_run_leaves_the_result_alone() {
    let mut options = Options::new(Soc::Rk3588);
    options.compute = false;
    let npu = Npu::with(options);
    let (ctx, _, [_, _, c]) = bound(&npu, &problem(7));
    c.write(&[7; 64]);
    assert_eq!(npu.run(ctx), 0);
    assert_eq!(c.read()[..64], [7; 64]);
}
