//! Faults on request, call counters, slots, and objects that outlive their machine.

use rknpu_ops::ffi::{MatmulType, MemSync, SYMBOLS};
use rknpu_ops::layout::Soc;
use rknpu_ops::sim::{
    self, Effect, Fault, LiveObjects, Options, SLOTS, StartError, When, WrongRows, parse_faults,
};

use crate::common::{Npu, Problem, info, start};

#[test]
fn fault_lists_are_read() {
    let faults =
        parse_faults(" rknn_matmul_run:3=-1 ,rknn_create_mem:10+=-4,rknn_matmul_run:M2=0,rknn_matmul_run:M64K576=0,")
            .unwrap();
    let fault = |effect, when| Fault { effect, when };
    let want = [
        fault(Effect::Code("rknn_matmul_run", -1), When::Nth(3)),
        fault(Effect::Code("rknn_create_mem", -4), When::From(10)),
        fault(Effect::Event(WrongRows { m: 2, k: None }), When::From(1)),
        fault(
            Effect::Event(WrongRows {
                m: 64,
                k: Some(576),
            }),
            When::From(1),
        ),
    ];
    assert_eq!(faults, want);
    assert_eq!(parse_faults(""), Ok(vec![]));
}

#[test]
fn malformed_faults_are_named() {
    for (piece, reason) in [
        ("rknn_matmul_run", "no colon"),
        ("rknn_walk:1=-1", "unknown function \"rknn_walk\""),
        ("rknn_matmul_run:1", "no equals sign"),
        ("rknn_matmul_run:1=x", "the code is not an integer"),
        ("rknn_matmul_run:1=0", "the code is not negative"),
        ("rknn_matmul_run:Mx=0", "M is not an integer"),
        ("rknn_matmul_run:M2Kx=0", "K is not an integer"),
        ("rknn_matmul_run:M2=-1", "the count is not an integer"),
        ("rknn_create_mem:M2=0", "the code is not negative"),
        ("rknn_matmul_run:x=-1", "the count is not an integer"),
        ("rknn_matmul_run:0=-1", "the count starts at 1"),
    ] {
        let error = parse_faults(&format!("rknn_query:1=-1,{piece}")).unwrap_err();
        assert!(error.to_string().contains(piece));
        assert!(error.to_string().contains(reason), "{error}");
        assert!(error.to_string().contains("rknn_create_mem_from_fd"));
    }
}

fn faulty(list: &str) -> Npu {
    let mut options = Options::new(Soc::Rk3588);
    options.faults = parse_faults(list).unwrap();
    Npu::with(options)
}

#[test]
fn the_nth_call_fails_and_no_other() {
    let npu = faulty("rknn_matmul_run:2=-2,rknn_create_mem:4=-4,rknn_matmul_create:2=-3");
    let problem = Problem::random(Soc::Rk3588, MatmulType::I8_I8_I32, [1, 32, 32], 1);
    let (a, b) = (problem.a_bytes(), problem.b_bytes());
    let (ctx, attr) = npu.create(problem.info).unwrap();
    assert_eq!(npu.create(problem.info).unwrap_err(), -3);
    let mems = [attr.a, attr.b, attr.c].map(|attr| npu.mem(ctx, attr.size).unwrap());
    assert!(npu.mem(ctx, 64).is_none());
    assert!(npu.mem(ctx, 64).is_some());
    mems[0].write(&a);
    mems[1].write(&b);
    for (mem, attr) in mems.iter().zip([attr.a, attr.b, attr.c]) {
        assert_eq!(npu.set(ctx, *mem, attr), 0);
    }
    npu.clean(ctx, mems[2]);
    assert_eq!([npu.run(ctx), npu.run(ctx), npu.run(ctx)], [0, -2, 0]);
    problem.check(&mems[2].read(), "after a fault");
    assert_eq!(npu.machine.calls("rknn_matmul_run"), 3);
    assert_eq!(npu.machine.calls("rknn_create_mem"), 5);
    assert_eq!(npu.machine.calls("no such function"), 0);
}

#[test]
fn every_function_can_fail() {
    for symbol in SYMBOLS {
        let npu = faulty(&format!("{symbol}:1+=-6"));
        let made = npu.create(info(MatmulType::I8_I8_I32, [1, 32, 32]));
        if *symbol == "rknn_matmul_create" {
            assert_eq!(made.unwrap_err(), -6);
            continue;
        }
        let (ctx, attr) = made.unwrap();
        let mem = npu.mem(ctx, 4096);
        assert_eq!(mem.is_none(), *symbol == "rknn_create_mem");
        let Some(mem) = mem else { continue };
        let view = npu.view(ctx, mem, 64, 0);
        assert_eq!(view.is_none(), *symbol == "rknn_create_mem_from_fd");
        for (name, code) in [
            ("rknn_mem_sync", npu.sync(ctx, mem, MemSync::TO_DEVICE)),
            ("rknn_matmul_set_io_mem", npu.set(ctx, mem, attr.a)),
            ("rknn_destroy_mem", npu.destroy_mem(ctx, mem)),
            ("rknn_matmul_destroy", npu.destroy(ctx)),
        ] {
            assert_eq!(code, if name == *symbol { -6 } else { 0 }, "{name}");
        }
    }
}

#[test]
fn machines_are_apart_and_slots_are_freed() {
    let first = faulty("rknn_matmul_run:1+=-1");
    let second = Npu::new(Soc::Rk3566);
    let request = info(MatmulType::I4_I4_I16, [1, 32, 64]);
    let (ctx, _) = first.create(request).unwrap();
    assert_eq!(second.create(request).unwrap_err(), -5);
    let live = |contexts, mems| LiveObjects { contexts, mems };
    assert_eq!(
        [first.machine.live(), second.machine.live()],
        [live(1, 0), live(0, 0)]
    );
    let mem = first.mem(ctx, 100).unwrap();
    assert_eq!(first.machine.live(), live(1, 1));
    assert_eq!(first.destroy_mem(ctx, mem), 0);
    assert_eq!(first.destroy(ctx), 0);
    assert_eq!(first.machine.live(), live(0, 0));
}

#[test]
fn contexts_outlive_their_machine() {
    let mut npu = Npu::new(Soc::Rk3588);
    let (ctx, attr) = npu
        .create(info(MatmulType::I8_I8_I32, [1, 32, 32]))
        .unwrap();
    let mem = npu.mem(ctx, attr.a.size).unwrap();
    npu.machine = start(Options::new(npu.soc));
    assert_eq!(npu.set(ctx, mem, attr.a), 0);
    assert_eq!(npu.destroy_mem(ctx, mem), 0);
    assert_eq!(npu.destroy(ctx), 0);
}

#[test]
fn too_many_machines_are_refused() {
    let mut machines = Vec::new();
    let error = loop {
        match sim::start(Options::new(Soc::Rk3562)) {
            Ok(machine) => machines.push(machine),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, StartError::NoSlot));
    assert!(machines.len() <= SLOTS);
    assert!(error.to_string().contains("32"));
}
