//! The attached I/O domain, which contexts must share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rknpu_ops::ffi::{MatmulCtx, MatmulType, MemSync};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::Options;

use crate::common::{Mem, Npu, Problem};

const I8: MatmulType = MatmulType::I8_I8_I32;

fn in_domain(problem: &Problem, domain: i32) -> Problem {
    let mut info = problem.info;
    info.iommu_domain_id = domain;
    Problem {
        info,
        a: problem.a.clone(),
        b: problem.b.clone(),
        ..*problem
    }
}

/// A context in `domain` with its three tensors bound.
fn bound(npu: &Npu, problem: &Problem) -> (MatmulCtx, [Mem; 3]) {
    let (ctx, attr) = npu.create(problem.info).unwrap();
    let mems = [attr.a, attr.b, attr.c].map(|attr| {
        let mem = npu.mem(ctx, attr.size).unwrap();
        assert_eq!(npu.set(ctx, mem, attr), 0);
        mem
    });
    (ctx, mems)
}

#[test]
fn each_change_of_domain_is_a_switch() {
    let npu = Npu::new(Soc::Rk3588);
    let problem = Problem::random(Soc::Rk3588, I8, [1, 32, 32], 1);
    let (zero, [a, ..]) = bound(&npu, &problem);
    assert_eq!(npu.machine.domain_switches(), 0);
    let (three, _) = bound(&npu, &in_domain(&problem, 3));
    assert_eq!(npu.machine.domain_switches(), 1);
    assert_eq!(npu.run(three), 0);
    assert_eq!(npu.machine.domain_switches(), 1);
    assert_eq!(npu.run(zero), 0);
    assert_eq!(npu.machine.domain_switches(), 2);
    // The memory's domain decides, not the domain of the context that names the memory.
    assert_eq!(npu.sync(three, a, MemSync::TO_DEVICE), 0);
    assert_eq!(npu.machine.domain_switches(), 2);
    assert_eq!(npu.destroy_mem(three, a), 0);
    assert_eq!(npu.machine.domain_switches(), 2);
}

#[test]
fn a_domain_waits_while_another_one_runs_and_gives_up() {
    let mut options = Options::new(Soc::Rk3588);
    options.domain_patience = Duration::ZERO;
    let npu = Npu::with(options);
    let problem = Problem::random(Soc::Rk3588, I8, [64, 1024, 256], 2);
    let (zero, _) = bound(&npu, &problem);
    let small = Problem::random(Soc::Rk3588, I8, [1, 32, 32], 3);
    let (one, _) = bound(&npu, &in_domain(&small, 1));
    let (stop, mut refused) = (AtomicBool::new(false), false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // Domain 1 may be attached at this moment, so the run may fail.
                assert!([0, -1].contains(&npu.run(zero)));
            }
        });
        // A busy machine may run the threads one after the other for a while.
        let deadline = Instant::now() + Duration::from_secs(60);
        while !refused && Instant::now() < deadline {
            refused = npu.run(one) != 0;
            std::thread::yield_now();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(refused, "runs in two domains went on at the same time");
    assert_eq!(npu.run(one), 0, "nothing uses domain 0 any more");
}

#[test]
fn work_in_two_domains_takes_turns() {
    let npu = Npu::new(Soc::Rk3588);
    std::thread::scope(|scope| {
        for domain in 0..2 {
            let npu = &npu;
            scope.spawn(move || {
                let problem = Problem::random(Soc::Rk3588, I8, [3, 96, 64], 3);
                let problem = in_domain(&problem, domain);
                let (a, b) = (problem.a_bytes(), problem.b_bytes());
                for _ in 0..20 {
                    problem.check(&npu.multiply(problem.info, &a, &b).unwrap(), "in turns");
                }
            });
        }
    });
    assert!(npu.machine.domain_switches() > 0);
}
