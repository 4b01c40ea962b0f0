//! Faults on request, each as the host sees it.

use std::thread;

use hexagon_ops::ffi::{CDSP_DOMAIN_ID, Domain, FASTRPC_MAP_FD_DELAYED, SYMBOLS, code, skel_uri};
use hexagon_ops::sim::{Effect, Fault, FaultError, Options, Trouble, When, knows, parse_faults};
use hexagon_ops::wire::{COMPLETED, Command, Nop, STATE, STATE_CLOSED};

use crate::host::{
    SLOTS, Session, alloc, alloc_exactly, allow_unsigned, announce, close, open, serve, start,
    wait_for,
};

fn machine(faults: &str) -> hexagon_ops::sim::Machine {
    start(Options {
        faults: parse_faults(faults).unwrap(),
        ..Options::new(75)
    })
}

fn nop() -> Command {
    Command::new(0, &Nop { reserved: 0 })
}

#[test]
fn lists_are_read() {
    let fault = |effect, when| Fault { effect, when };
    assert_eq!(
        parse_faults("remote_handle64_open:1=0x80000406, fastrpc_mmap:10+=-4,,dsp:3=hang").unwrap(),
        [
            fault(
                Effect::Code("remote_handle64_open", code::dsp(code::EUNABLETOLOAD)),
                When::Nth(1)
            ),
            fault(Effect::Code("fastrpc_mmap", -4), When::From(10)),
            fault(Effect::Event(Trouble::Hang), When::Nth(3)),
        ]
    );
    assert_eq!(parse_faults("").unwrap(), []);
    for (text, trouble) in [
        ("dsp:1=lost", Trouble::Lost),
        ("dsp:1=corrupt", Trouble::Corrupt),
        ("dsp:1=badring", Trouble::BadRing),
    ] {
        assert_eq!(
            parse_faults(text).unwrap()[0].effect,
            Effect::Event(trouble)
        );
    }
}

#[test]
fn what_cannot_be_read_says_why() {
    for (text, reason) in [
        ("dsp", "no colon"),
        ("dsp:1", "no equals sign"),
        (
            "dsp:1=explode",
            "not one of hang, lost, corrupt, badring, wrong",
        ),
        ("dsp:0=hang", "the count starts at 1"),
        ("dsp:x=hang", "the count is not an integer"),
        ("rpcmem_alloc:1=0", "the code is 0, which is success"),
        (
            "rpcmem_alloc:1=0x1ffffffff",
            "the code is not an integer of 32 bits",
        ),
        (
            "rpcmem_alloc:1=hang",
            "the code is not an integer of 32 bits",
        ),
    ] {
        match parse_faults(text) {
            Err(FaultError::Syntax { reason: have, .. }) => assert_eq!(have, reason, "{text}"),
            other => panic!("{text}: {other:?}"),
        }
    }
    let unknown = parse_faults("rknn_matmul_run:1=-1").unwrap_err();
    assert!(matches!(unknown, FaultError::UnknownFunction { .. }));
    assert!(knows("dsp") && SYMBOLS.iter().all(|symbol| knows(symbol)));
    assert!(!knows("rknn_matmul_run") && !knows(""));
}

#[test]
fn functions_fail_at_the_call_that_is_named() {
    let machine = machine(
        "remote_handle64_open:2=0x80000406,rpcmem_alloc:3+=2,fastrpc_mmap:1=0x65,\
         remote_handle64_invoke:1=-1,remote_session_control:2=0x14,remote_handle64_close:1=9,rpcmem_to_fd:2=5",
    );
    let api = machine.api();
    assert_eq!(allow_unsigned(&api, -1), 0);
    assert_eq!(allow_unsigned(&api, -1), 0x14);
    let uri = skel_uri(75, Domain::Cdsp, 0);
    let handle = open(&api, &uri).unwrap();
    assert_eq!(open(&api, &uri), Err(code::dsp(code::EUNABLETOLOAD)));
    assert!(open(&api, &uri).is_ok());
    let memory = alloc(&api, 4096).unwrap();
    assert_eq!(alloc(&api, 4096).unwrap().fd, -1);
    assert!(alloc(&api, 4096).is_none() && alloc(&api, 4096).is_none());
    let map = || announce(&api, CDSP_DOMAIN_ID, memory, FASTRPC_MAP_FD_DELAYED);
    assert_eq!((map(), map()), (0x65, 0));
    assert_eq!(serve(&api, handle, 0), -1);
    assert_eq!(serve(&api, handle, 0), hexagon_ops::wire::ERROR_CALL);
    assert_eq!(close(&api, handle), 9);
    assert_eq!(close(&api, handle), 0);
    assert_eq!(machine.calls("remote_handle64_open"), 3);
    assert_eq!(machine.calls("no such function"), 0);
}

#[test]
fn a_hang_lasts_until_the_handle_is_closed() {
    for text in ["dsp:2=hang", "dsp:2=badring"] {
        let machine = machine(text);
        let mut session = Session::new(&machine, 75);
        session.start().unwrap();
        assert_eq!(session.run(&[nop()]).status, 0);
        let (api, handle) = (session.api, session.handle);
        session.submit(&[nop()]);
        let server = thread::spawn(move || serve(&api, handle, 0));
        wait_for(|| (machine.submissions() == 2).then_some(()));
        if text == "dsp:2=hang" {
            thread::sleep(std::time::Duration::from_millis(50));
            assert_eq!(session.collect(), None);
        } else {
            let count = wait_for(|| {
                let count = session.shared.load(COMPLETED);
                (count != 1).then_some(count)
            });
            assert!(count.wrapping_sub(1) > SLOTS, "{count}");
        }
        assert!(!server.is_finished());
        assert_eq!(close(&session.api, session.handle), 0);
        assert_ne!(server.join().unwrap(), 0);
    }
}

#[test]
fn a_lost_process_fails_this_call_and_all_later_ones() {
    let machine = machine("dsp:2=lost");
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    assert_eq!(session.run(&[nop()]).status, 0);
    session.submit(&[nop()]);
    let api = session.api;
    assert_eq!(serve(&api, session.handle, 0), code::dsp(code::EBADSTATE));
    assert_eq!(session.collect(), None);
    assert_eq!(session.shared.load(STATE), STATE_CLOSED);
    let memory = alloc(&api, 4096).unwrap();
    for _ in 0..2 {
        assert_eq!(serve(&api, session.handle, 0), code::ECONNRESET);
        assert_eq!(
            open(&api, &skel_uri(75, Domain::Cdsp, 0)),
            Err(code::ECONNRESET)
        );
        assert_eq!(
            announce(&api, CDSP_DOMAIN_ID, memory, FASTRPC_MAP_FD_DELAYED),
            code::ECONNRESET
        );
    }
    assert_eq!(close(&api, session.handle), code::ECONNRESET);
    // The process ended with its last handle, so a new one can be started.
    let again = Session::new(&machine, 75);
    assert!(again.start().is_ok());
}

#[test]
fn a_corrupt_completion_is_not_what_was_asked_for() {
    let machine = machine("dsp:1=corrupt");
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    session.submit(&[nop()]);
    assert_eq!(serve(&session.api, session.handle, 0), 0);
    let completion = session.collect().unwrap();
    assert_ne!(completion.sequence, session.sequence);
    assert_ne!(completion.reserved, [0; 11]);
    assert_eq!(session.run(&[nop()]).status, 0);
}

#[test]
fn an_allocation_fails_with_null_or_with_map_failed() {
    let machine = machine("rpcmem_alloc2:1=-1,rpcmem_alloc2:2=2");
    let api = machine.api();
    assert_eq!(alloc_exactly(&api, 4096).addr(), usize::MAX);
    assert!(alloc_exactly(&api, 4096).is_null());
    assert!(!alloc_exactly(&api, 4096).is_null());
}
