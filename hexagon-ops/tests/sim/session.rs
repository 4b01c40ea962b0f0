//! Products end to end, on one thread and with a thread that serves, in one session and in two.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use hexagon_ops::ffi::{
    Domain, FASTRPC_GET_URI, FASTRPC_MAP_FD_DELAYED, FASTRPC_RESERVE_NEW_SESSION, GetUri,
    ReserveNewSession, code, skel_uri,
};
use hexagon_ops::layout::WeightType;
use hexagon_ops::rt::shared::Shared;
use hexagon_ops::sim::Options;
use hexagon_ops::wire::{
    Command, ERROR_LATER, Nop, STATE, STATE_CLOSED, STATE_PARKED, WISH, WISH_CLOSE,
};

use crate::common::Numbers;
use crate::host::{
    Session, alloc, allow_unsigned, announce, close, free, open, retract, serve, session_control,
    start, wait_for,
};
use crate::product::Product;

const NMSE: f64 = 5e-4;

#[test]
fn every_chip_multiplies_every_type() {
    let mut numbers = Numbers::default();
    for arch in [73, 75, 79, 81] {
        let machine = start(Options::new(arch));
        let mut session = Session::new(&machine, arch);
        let info = session.start().unwrap();
        assert_eq!((info.arch, info.vtcm_bytes), (arch, (8 << 20) - (64 << 10)));
        for weight in WeightType::ALL {
            for m in [1, 3] {
                let product = Product::new(&mut session, weight, m, &mut numbers);
                product.load();
                assert_eq!(session.run(&[product.command]).status, 0);
                assert!(product.error() < NMSE, "v{arch} {weight:?} M {m}");
            }
        }
        assert_eq!(close(&session.api, session.handle), 0);
        assert_eq!(machine.live().mappings, 0);
    }
}

#[test]
fn a_thread_serves_parks_and_is_woken() {
    let mut numbers = Numbers::default();
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let product = Product::new(&mut session, WeightType::Q4_0, 2, &mut numbers);
    product.load();
    let (api, handle, shared) = (session.api, session.handle, session.shared.clone());
    // A very short idle time, so that the race between parking and publishing occurs often.
    let server = thread::spawn(move || {
        let mut calls = 0;
        loop {
            assert_eq!(serve(&api, handle, 5), 0);
            calls += 1;
            if shared.load(STATE) == STATE_CLOSED {
                return calls;
            }
            // A real host sleeps until something is published; this one looks in a loop.
            shared.fence();
            thread::yield_now();
        }
    });
    for _ in 0..300 {
        session.submit(&[product.command]);
        let completion = wait_for(|| session.collect());
        assert_eq!(
            (completion.sequence, completion.status),
            (session.sequence, 0)
        );
    }
    session.shared.store(WISH, WISH_CLOSE);
    assert!(server.join().unwrap() > 1);
    assert!(product.error() < NMSE);
}

/// The first call of the host was ended by a signal, and the DSP goes on with it.
#[test]
fn a_second_call_that_serves_returns_at_once() {
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let (api, handle) = (session.api, session.handle);
    let server = thread::spawn(move || serve(&api, handle, u32::MAX));
    wait_for(|| (session.shared.load(STATE) != STATE_PARKED).then_some(()));
    assert_eq!(serve(&api, handle, u32::MAX), 0);
    session.submit(&[Command::new(0, &Nop { reserved: 0 })]);
    assert_eq!(wait_for(|| session.collect()).status, 0);
    session.shared.store(WISH, WISH_CLOSE);
    assert_eq!(server.join().unwrap(), 0);
}

#[test]
fn closing_a_handle_ends_its_call() {
    let machine = start(Options::new(75));
    let session = Session::new(&machine, 75);
    session.start().unwrap();
    let (api, handle) = (session.api, session.handle);
    let server = thread::spawn(move || serve(&api, handle, u32::MAX));
    wait_for(|| (session.shared.load(STATE) != STATE_PARKED).then_some(()));
    assert_eq!(close(&session.api, session.handle), 0);
    assert_ne!(server.join().unwrap(), 0);
    assert_eq!(session.shared.load(STATE), STATE_CLOSED);
}

/// A host unmaps the ring of a parked DSP before it closes the handle. The DSP's process lives on
/// for another handle, and an access to the ring would end it.
#[test]
fn closing_a_handle_does_not_touch_a_ring_that_is_unmapped() {
    let machine = start(Options::new(75));
    let [session, other] = [0; 2].map(|_| Session::new(&machine, 75));
    session.start().unwrap();
    assert_eq!(serve(&session.api, session.handle, 0), 0);
    assert_eq!(session.shared.load(STATE), STATE_PARKED);
    assert_eq!(retract(&session.api, session.domain, session.ring), 0);
    assert_eq!(close(&session.api, session.handle), 0);
    assert_eq!(session.shared.load(STATE), STATE_PARKED);
    other.start().unwrap();
    assert_eq!(close(&other.api, other.handle), 0);
}

/// Holders of VTCM that cannot lower their priority never learn that others wait for it.
#[test]
fn an_idle_session_without_priorities_gives_vtcm_back_at_once() {
    // With priorities, the call respects the idle time that the host asks for.
    for (has_priorities, idle_us, takes_ms) in
        [(false, 8_000_000, 2..4000), (true, 40_000, 40..8000)]
    {
        let machine = start(Options {
            shared_vtcm: true,
            has_priorities,
            ..Options::new(75)
        });
        let session = Session::new(&machine, 75);
        session.start().unwrap();
        let began = Instant::now();
        assert_eq!(serve(&session.api, session.handle, idle_us), 0);
        let took = began.elapsed().as_millis();
        assert!(takes_ms.contains(&took), "{took} ms, not {takes_ms:?}");
    }
}

/// Ends all calls that serve.
struct End<'a> {
    sessions: [Arc<Shared>; 2],
    is_over: &'a AtomicBool,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        for shared in &self.sessions {
            shared.store(WISH, WISH_CLOSE);
        }
    }
}

/// Neither session is ever idle for long enough to park: its call returns only because the other
/// one waits for VTCM.
#[test]
fn a_busy_session_gives_vtcm_to_one_that_waits() {
    let mut numbers = Numbers::default();
    let mut options = Options::new(75);
    options.shared_vtcm = true;
    let machine = start(options);
    let mut sessions = [0; 2].map(|_| Session::new(&machine, 75));
    let products = [0, 1].map(|i| {
        sessions[i].start().unwrap();
        Product::new(&mut sessions[i], WeightType::Q4_0, 2, &mut numbers)
    });
    products.iter().for_each(Product::load);
    let is_over = AtomicBool::new(false);
    let end = End {
        sessions: sessions
            .each_ref()
            .map(|session| Arc::clone(&session.shared)),
        is_over: &is_over,
    };
    thread::scope(|scope| {
        // Declared so that it is dropped before the threads are joined, also after a failure.
        let _end = end;
        for session in &sessions {
            let (api, handle, is_over) = (session.api, session.handle, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let code = serve(&api, handle, u32::MAX);
                    let is_end = is_over.load(Ordering::Relaxed);
                    assert!([0, ERROR_LATER].contains(&code) || is_end, "{code:#x}");
                }
            });
        }
        let [busy, waiting] = &mut sessions;
        let (command, is_over) = (products[0].command, &is_over);
        scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                busy.submit(&[command]);
                while !is_over.load(Ordering::Relaxed) {
                    if let Some(completion) = busy.collect() {
                        assert_eq!(completion.status, 0);
                        break;
                    }
                    thread::yield_now();
                }
            }
        });
        for _ in 0..50 {
            waiting.submit(&[products[1].command]);
            assert_eq!(wait_for(|| waiting.collect()).status, 0);
        }
    });
    for product in &products {
        assert!(product.error() < NMSE);
    }
}

#[test]
fn dropping_the_machine_ends_its_calls() {
    let machine = start(Options::new(75));
    let session = Session::new(&machine, 75);
    session.start().unwrap();
    let (api, handle) = (session.api, session.handle);
    let server = thread::spawn(move || serve(&api, handle, u32::MAX));
    wait_for(|| (session.shared.load(STATE) != STATE_PARKED).then_some(()));
    drop(machine);
    assert_ne!(server.join().unwrap(), 0);
}

#[test]
fn two_handles_compute_at_once() {
    let mut numbers = Numbers::default();
    let machine = start(Options::new(79));
    let mut sessions = [0; 2].map(|_| Session::new(&machine, 79));
    let products = [WeightType::Q8_0, WeightType::F16].map(|weight| {
        let session = &mut sessions[usize::from(weight == WeightType::F16)];
        session.start().unwrap();
        let product = Product::new(session, weight, 4, &mut numbers);
        product.load();
        product
    });
    thread::scope(|scope| {
        for session in &sessions {
            let (api, handle) = (session.api, session.handle);
            scope.spawn(move || assert_eq!(serve(&api, handle, u32::MAX), 0));
        }
        for _ in 0..50 {
            for (session, product) in sessions.iter_mut().zip(&products) {
                session.submit(&[product.command]);
            }
            for session in &sessions {
                assert_eq!(wait_for(|| session.collect()).status, 0);
            }
        }
        for session in &sessions {
            session.shared.store(WISH, WISH_CLOSE);
        }
    });
    for product in &products {
        assert!(product.error() < NMSE);
    }
    assert_eq!(machine.live().handles, 2);
}

#[test]
fn reserved_sessions_are_processes_of_their_own() {
    let machine = start(Options::new(73));
    let api = machine.api();
    let first = Session::new(&machine, 73);
    first.start().unwrap();
    let domain_name_len = 4;
    let name = c"two";
    let mut new = ReserveNewSession {
        domain_name: Domain::Cdsp.name().as_ptr(),
        domain_name_len,
        session_name: name.as_ptr(),
        session_name_len: 4,
        effective_domain_id: 0,
        session_id: 0,
    };
    assert_eq!(
        session_control(&api, FASTRPC_RESERVE_NEW_SESSION, &mut new),
        0
    );
    assert_eq!((new.session_id, new.effective_domain_id), (1, 11));
    let module =
        c"file:///libggml_rust_npu_skel_v73.so?ggml_rust_npu_skel_handle_invoke&_modver=1.0";
    let mut uri = [0_u8; 200];
    let mut ask = GetUri {
        domain_name: Domain::Cdsp.name().as_ptr(),
        domain_name_len,
        session_id: 1,
        module_uri: module.as_ptr(),
        module_uri_len: 82,
        uri: uri.as_mut_ptr().cast(),
        uri_len: 200,
    };
    assert_eq!(session_control(&api, FASTRPC_GET_URI, &mut ask), 0);
    let uri = std::ffi::CStr::from_bytes_until_nul(&uri).unwrap();
    assert_eq!(uri.to_str().unwrap(), skel_uri(73, Domain::Cdsp, 1));
    let domain = i32::try_from(new.effective_domain_id).unwrap();
    let second = Session::open(&machine, uri.to_str().unwrap(), domain);
    second.start().unwrap();
    // Three sessions can be reserved in addition to the default one.
    for code in [0, 0, code::ENOSESSION] {
        assert_eq!(
            session_control(&api, FASTRPC_RESERVE_NEW_SESSION, &mut new),
            code
        );
    }
}

#[test]
fn the_second_dsp_has_sessions_and_memory_apart_from_the_first() {
    let uri = skel_uri(73, Domain::Cdsp1, 0);
    let machine = start(Options::new(73));
    assert_eq!(open(&machine.api(), &uri), Err(code::EINVALIDDOMAIN));
    let id = Domain::Cdsp1.id();
    assert_eq!(allow_unsigned(&machine.api(), id), code::EBADPARM);
    let machine = start(Options {
        dsps: 2,
        ..Options::new(73)
    });
    let api = machine.api();
    let first = Session::new(&machine, 73);
    first.start().unwrap();
    let memory = alloc(&api, 4096).unwrap();
    let map = || announce(&api, id, memory, FASTRPC_MAP_FD_DELAYED);
    // No process is there yet.
    assert_eq!(map(), code::EBADDOMAIN);
    let mut second = Session::open(&machine, &uri, id);
    second.start().unwrap();
    assert_eq!(map(), 0);
    let mut numbers = Numbers::default();
    let product = Product::new(&mut second, WeightType::Q4_0, 2, &mut numbers);
    product.load();
    assert_eq!(second.run(&[product.command]).status, 0);
    assert!(product.error() < NMSE);
    let name = c"two";
    let mut new = ReserveNewSession {
        domain_name: Domain::Cdsp1.name().as_ptr(),
        domain_name_len: 5,
        session_name: name.as_ptr(),
        session_name_len: 4,
        effective_domain_id: 0,
        session_id: 0,
    };
    let code = session_control(&api, FASTRPC_RESERVE_NEW_SESSION, &mut new);
    assert_eq!((code, new.session_id, new.effective_domain_id), (0, 1, 12));
}

/// Returns a number of this process from /proc.
fn own(file: &str, key: &str) -> usize {
    let text = std::fs::read_to_string(file).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.parse().unwrap()
}

/// Opens and closes sessions of two threads on four vector units, one after the other.
fn open_and_close(count: usize) {
    // Other tests run at the same time, but use fewer threads and less memory than a leak in a
    // third of the sessions would.
    let status = "/proc/self/status";
    let (threads, size_kib) = (own(status, "Threads:"), own(status, "VmSize:"));
    let options = Options {
        hvx_threads: 4,
        ..Options::new(75)
    };
    let machine = start(options);
    for _ in 0..count {
        let mut session = Session::new(&machine, 75);
        let info = session.start().unwrap();
        assert_eq!((info.threads, info.units), (2, 4));
        let nop = Command::new(0, &Nop { reserved: 0 });
        assert_eq!(session.run(&[nop]).status, 0);
        assert_eq!(close(&session.api, session.handle), 0);
        let (api, ring) = (session.api, session.ring.base);
        drop(session);
        free(&api, ring.cast());
    }
    let live = machine.live();
    assert_eq!((live.handles, live.allocations, live.mappings), (0, 0, 0));
    let (more_threads, more_kib) = (own(status, "Threads:"), own(status, "VmSize:"));
    assert!(
        more_threads < threads + count / 2,
        "{threads}, then {more_threads} threads"
    );
    assert!(
        more_kib < size_kib + count * 8192 / 3,
        "{size_kib}, then {more_kib} KiB"
    );
}

#[test]
fn closed_sessions_leave_no_threads_and_no_memory() {
    open_and_close(300);
}

#[test]
#[ignore = "takes minutes; the short one runs always"]
fn ten_thousand_closed_sessions_leave_no_threads_and_no_memory() {
    open_and_close(10_000);
}
