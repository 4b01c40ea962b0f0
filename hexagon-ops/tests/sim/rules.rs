//! FastRPC's rules: the order of calls, the modules that can be loaded, the memory that can be
//! mapped, and the answers.

use std::ffi::c_int;
use std::ptr::null_mut;

use hexagon_ops::ffi::{
    CDSP_DOMAIN_ID, Domain, FASTRPC_MAP_FD, FASTRPC_MAP_FD_DELAYED, FASTRPC_RESERVE_NEW_SESSION,
    FASTRPC_SESSION_CLOSE, ReserveNewSession, SessionClose, arch_of, attribute, code, skel_uri,
};
use hexagon_ops::serve::{MAP_FULL, MAP_REFUSED};
use hexagon_ops::sim::{Options, StartError};
use hexagon_ops::wire::{
    Command, ERROR_RING, ERROR_STACK, Map, STACK_NEEDED_BYTES, STATUS_MAP_FAILED, STATUS_OK, Unmap,
};

use crate::host::{
    Memory, Session, alloc, alloc_exactly, allow_unsigned, announce, ask_for_stack, capability,
    close, free, init_rpcmem, open, retract, serve, session_control, start,
};

#[test]
fn unsigned_modules_must_be_allowed_before_opening() {
    let machine = start(Options::new(75));
    let api = machine.api();
    let refused = Err(code::dsp(code::EUNABLETOLOAD));
    assert_eq!(open(&api, &skel_uri(75, Domain::Cdsp, 0)), refused);
    assert_eq!(allow_unsigned(&api, CDSP_DOMAIN_ID), 0);
    let handle = open(&api, &skel_uri(75, Domain::Cdsp, 0)).unwrap();
    // Other sessions are separate processes.
    assert_eq!(open(&api, &skel_uri(75, Domain::Cdsp, 1)), refused);
    assert_eq!(allow_unsigned(&api, CDSP_DOMAIN_ID), 0);
    assert_eq!(allow_unsigned(&api, 2), code::EBADPARM);
    assert_eq!(close(&api, handle), 0);
    assert_eq!(close(&api, handle), code::EINVHANDLE);
}

#[test]
fn firmware_without_unsigned_modules_refuses() {
    let machine = start(Options {
        unsigned_modules: false,
        ..Options::new(75)
    });
    let api = machine.api();
    assert_eq!(capability(&api, attribute::UNSIGNED_PD_SUPPORT), (0, 0));
    assert_eq!(allow_unsigned(&api, -1), 0);
    assert_eq!(
        open(&api, &skel_uri(75, Domain::Cdsp, 0)),
        Err(code::dsp(code::EUNSUPPORTED))
    );
}

#[test]
fn only_the_right_library_can_be_loaded() {
    let machine = start(Options::new(75));
    let api = machine.api();
    assert_eq!(allow_unsigned(&api, -1), 0);
    let unloadable = code::dsp(code::EUNABLETOLOAD);
    for (uri, error) in [
        (skel_uri(73, Domain::Cdsp, 0), unloadable),
        (skel_uri(79, Domain::Cdsp, 0), unloadable),
        (
            skel_uri(75, Domain::Cdsp, 0).replace("libggml", "libother"),
            unloadable,
        ),
        (
            skel_uri(75, Domain::Cdsp, 0).replace("file:///", ""),
            unloadable,
        ),
        (
            skel_uri(75, Domain::Cdsp, 0).replace("_handle_invoke", "_handle"),
            code::dsp(code::ENOSUCHSYMBOL),
        ),
        (
            skel_uri(75, Domain::Cdsp, 0).replace("cdsp", "adsp"),
            code::EINVALIDDOMAIN,
        ),
        (skel_uri(75, Domain::Cdsp, 4), code::EBADPARM),
    ] {
        assert_eq!(open(&api, &uri), Err(error), "{uri}");
    }
}

#[test]
fn chips_say_what_they_are() {
    for arch in [73, 75, 79, 81] {
        let machine = start(Options::new(arch));
        let api = machine.api();
        let (code, version) = capability(&api, attribute::ARCH_VER);
        assert_eq!((code, arch_of(version)), (0, arch));
        let vtcm = [attribute::VTCM_PAGE, attribute::VTCM_COUNT].map(|a| capability(&api, a).1);
        assert_eq!(vtcm[0] * vtcm[1], 8 << 20);
        assert!(capability(&api, attribute::HVX_SUPPORT_128B).1 > 0);
        assert_eq!(capability(&api, attribute::HMX_SUPPORT_DEPTH), (0, 1));
        assert_eq!(capability(&api, 1000).0, code::EBADPARM);
    }
    assert!(matches!(
        hexagon_ops::sim::start(Options::new(66)),
        Err(StartError::Arch { arch: 66, .. })
    ));
}

#[test]
fn requests_of_the_wrong_size_are_refused() {
    let machine = start(Options::new(75));
    let api = machine.api();
    for request in [1, 2, 7, 13, 15] {
        assert_eq!(
            session_control(&api, request, &mut [0_u8; 3]),
            code::EBADPARM,
            "{request}"
        );
    }
    assert_eq!(session_control(&api, 999, &mut 0_u32), code::EUNSUPPORTED);
}

/// Requests that the DSP maps memory, and returns (status, detail).
fn map(session: &mut Session, buffer: u32, memory: Memory, bytes: usize) -> (u32, u32) {
    let map = Map {
        buffer,
        fd: memory.fd,
        bytes: bytes as u64,
    };
    let completion = session.run(&[Command::new(0, &map)]);
    (completion.status, completion.detail)
}

fn unmap(session: &mut Session, buffer: u32) -> u32 {
    let unmap = Unmap {
        buffer,
        reserved: 0,
    };
    session.run(&[Command::new(0, &unmap)]).status
}

#[test]
fn the_address_space_is_a_budget() {
    for flags in [FASTRPC_MAP_FD_DELAYED, FASTRPC_MAP_FD] {
        // The ring would need 8 KiB if it were pinned, but it is not.
        let machine = start(Options {
            address_bytes: 3 << 20,
            ..Options::new(73)
        });
        let mut session = Session::new(&machine, 73);
        session.start().unwrap();
        let memories: Vec<Memory> = (0..4)
            .map(|_| alloc(&session.api, 1 << 20).unwrap())
            .collect();
        let announced =
            |session: &Session, memory| announce(&session.api, CDSP_DOMAIN_ID, memory, flags);
        if flags == FASTRPC_MAP_FD {
            for memory in &memories[..3] {
                assert_eq!(announced(&session, *memory), 0);
            }
            assert_eq!(announced(&session, memories[3]), code::dsp(code::EMMAP));
            assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, memories[0]), 0);
            assert_eq!(announced(&session, memories[3]), 0);
            continue;
        }
        for memory in &memories {
            assert_eq!(announced(&session, *memory), 0);
        }
        for (buffer, memory) in (0..3).zip(&memories) {
            assert_eq!(map(&mut session, buffer, *memory, 1 << 20).0, STATUS_OK);
        }
        let full = (STATUS_MAP_FAILED, MAP_FULL);
        assert_eq!(map(&mut session, 3, memories[3], 1 << 20), full);
        assert_eq!(unmap(&mut session, 1), STATUS_OK);
        assert_eq!(map(&mut session, 3, memories[3], 1 << 20).0, STATUS_OK);
        assert_eq!(map(&mut session, 1, memories[1], 1 << 20), full);
    }
}

/// The test has the limits of mainline Linux, where a session's buffers have addresses of 32 bits.
#[test]
fn the_window_of_a_session_is_a_budget() {
    let machine = start(Options {
        window_bytes: 3 << 20,
        dsps: 2,
        ..Options::new(75)
    });
    let session = Session::new(&machine, 75);
    let second = Domain::Cdsp1;
    let _other = Session::open(&machine, &skel_uri(75, second, 0), second.id());
    let delayed = FASTRPC_MAP_FD_DELAYED;
    let memories: Vec<Memory> = (0..3)
        .map(|_| alloc(&session.api, 1 << 20).unwrap())
        .collect();
    let announced = |domain, memory| announce(&session.api, domain, memory, delayed);
    assert_eq!(announced(CDSP_DOMAIN_ID, memories[0]), 0);
    assert_eq!(announced(CDSP_DOMAIN_ID, memories[1]), 0);
    // The ring is mapped as well.
    assert_eq!(announced(CDSP_DOMAIN_ID, memories[2]), code::EFAILED);
    assert_eq!(announced(second.id(), memories[2]), 0);
    assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, memories[0]), 0);
    assert_eq!(announced(CDSP_DOMAIN_ID, memories[2]), 0);
}

#[test]
fn the_dsp_maps_only_what_was_announced() {
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let api = session.api;
    let memory = alloc(&api, 8192).unwrap();
    let refused = (STATUS_MAP_FAILED, MAP_REFUSED);
    assert_eq!(map(&mut session, 0, memory, 8192), refused);
    let part = Memory {
        bytes: 4096,
        ..memory
    };
    assert_eq!(
        announce(&api, CDSP_DOMAIN_ID, part, FASTRPC_MAP_FD_DELAYED),
        0
    );
    assert_eq!(
        announce(&api, CDSP_DOMAIN_ID, memory, FASTRPC_MAP_FD_DELAYED),
        code::EALREADY
    );
    assert_eq!(map(&mut session, 0, memory, 8192), refused);
    assert_eq!(map(&mut session, 0, memory, 4096).0, STATUS_OK);
    assert_eq!(retract(&api, CDSP_DOMAIN_ID, part), code::EBADPARM);
    assert_eq!(unmap(&mut session, 0), STATUS_OK);
    assert_eq!(retract(&api, CDSP_DOMAIN_ID, part), 0);
    assert_eq!(retract(&api, CDSP_DOMAIN_ID, part), code::ENOSUCHMAP);

    let bad = |change: fn(&mut Memory), domain: c_int, flags: c_int| {
        let mut memory = memory;
        change(&mut memory);
        announce(&api, domain, memory, flags)
    };
    let delayed = FASTRPC_MAP_FD_DELAYED;
    assert_eq!(bad(|m| m.fd = -1, CDSP_DOMAIN_ID, delayed), code::EBADPARM);
    assert_eq!(bad(|m| m.fd = 0, CDSP_DOMAIN_ID, delayed), code::EBADFD);
    for (bytes, error) in [
        (0, code::EBADPARM),
        (4095, code::EBADPARM),
        (8191, code::EBADPARM),
        (12288, code::EBADSIZE),
        (1 << 31, code::EBADPARM),
    ] {
        let other = Memory { bytes, ..memory };
        assert_eq!(
            announce(&api, CDSP_DOMAIN_ID, other, delayed),
            error,
            "{bytes}"
        );
    }
    assert_eq!(bad(|_| (), CDSP_DOMAIN_ID, 0), code::EBADPARM);
    assert_eq!(bad(|_| (), 2, delayed), code::EBADPARM);
    // Session 1 has no process yet.
    assert_eq!(bad(|_| (), 11, delayed), code::EBADDOMAIN);
}

#[test]
fn a_ring_must_be_announced_too() {
    let machine = start(Options::new(75));
    let session = Session::new(&machine, 75);
    assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, session.ring), 0);
    assert_eq!(session.start(), Err(ERROR_RING));
}

#[test]
fn freed_memory_stays_as_long_as_the_dsp_has_it() {
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let (memory, buffer) = session.buffer(4096);
    free(&session.api, memory.base.cast());
    free(&session.api, memory.base.cast());
    free(&session.api, null_mut());
    assert_eq!(unmap(&mut session, buffer), STATUS_OK);
    let (live, ring) = (machine.live(), 1);
    assert_eq!((live.allocations, live.handles), (ring, 1));
}

/// Returns memory whose descriptor has this number.
fn alloc_as(session: &Session, number: c_int, bytes: usize) -> Option<Memory> {
    // Another test of this process may take the descriptor's number first, so several attempts are
    // made.
    (0..8)
        .filter_map(|_| alloc(&session.api, bytes))
        .find(|memory| memory.fd == number)
}

/// As with libraries without a list of mappings, above kernels that do not compare the memory.
#[test]
fn a_number_that_is_used_again_has_the_memory_that_stayed_mapped() {
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let (first, _, _) = session.memory(4096);
    free(&session.api, first.base.cast());
    let Some(second) = alloc_as(&session, first.fd, 8192) else {
        return println!("SKIPPED: another test has taken descriptor {}", first.fd);
    };
    let delayed = FASTRPC_MAP_FD_DELAYED;
    assert_eq!(announce(&session.api, CDSP_DOMAIN_ID, second, delayed), 0);
    // The number still names the first memory, which is shorter.
    let refused = (STATUS_MAP_FAILED, MAP_REFUSED);
    assert_eq!(map(&mut session, 0, second, 8192), refused);
    assert_eq!(map(&mut session, 0, second, 4096).0, STATUS_OK);
}

#[test]
fn a_mapping_goes_with_the_call_in_which_the_dsp_unmapped_it() {
    let machine = start(Options {
        vanishing_maps: true,
        ..Options::new(75)
    });
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let (memory, buffer) = session.buffer(4096);
    assert_eq!(unmap(&mut session, buffer), STATUS_OK);
    let refused = (STATUS_MAP_FAILED, MAP_REFUSED);
    assert_eq!(map(&mut session, buffer, memory, 4096), refused);
    // The library never removes the number from its list.
    let gone = code::EUNSUPPORTED;
    assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, memory), gone);
    let again = |memory| announce(&session.api, CDSP_DOMAIN_ID, memory, FASTRPC_MAP_FD_DELAYED);
    assert_eq!(again(memory), code::EALREADY);
    // A duplicate of the descriptor has another number.
    let file = std::fs::File::open(format!("/proc/self/fd/{}", memory.fd)).unwrap();
    let duplicate = Memory {
        fd: std::os::fd::AsRawFd::as_raw_fd(&file),
        ..memory
    };
    assert_eq!(again(duplicate), 0);
    assert_eq!(map(&mut session, buffer, duplicate, 4096).0, STATUS_OK);
}

#[test]
fn room_of_what_is_unmapped_comes_when_a_call_ends() {
    let machine = start(Options {
        window_bytes: 3 << 20,
        late_unmaps: true,
        ..Options::new(75)
    });
    let session = Session::new(&machine, 75);
    session.start().unwrap();
    let memories = [0; 2].map(|_| alloc(&session.api, 2 << 20).unwrap());
    let delayed = FASTRPC_MAP_FD_DELAYED;
    let announced = |memory| announce(&session.api, CDSP_DOMAIN_ID, memory, delayed);
    assert_eq!(announced(memories[0]), 0);
    assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, memories[0]), 0);
    assert_eq!(announced(memories[1]), code::EFAILED);
    assert_eq!(serve(&session.api, session.handle, 0), 0);
    assert_eq!(announced(memories[1]), 0);
}

#[test]
fn an_allocator_may_have_to_be_made_ready_and_forgets_what_it_has() {
    let machine = start(Options {
        needs_rpcmem_init: true,
        ..Options::new(75)
    });
    let api = machine.api();
    assert!(alloc(&api, 4096).is_none());
    init_rpcmem(&api);
    assert!(alloc(&api, 4096).is_some());
    assert_eq!(machine.live().allocations, 1);
    init_rpcmem(&api);
    assert_eq!(machine.live().allocations, 0);
}

#[test]
fn closing_a_session_closes_its_handles() {
    let machine = start(Options::new(75));
    let first = Session::new(&machine, 75);
    let _second = Session::new(&machine, 75);
    let mut ask = SessionClose {
        domain: CDSP_DOMAIN_ID,
    };
    assert_eq!(
        session_control(&first.api, FASTRPC_SESSION_CLOSE, &mut ask),
        0
    );
    assert_eq!((machine.live().handles, machine.live().mappings), (0, 0));
}

#[test]
fn allocations_are_whole_pages_below_2_gib() {
    let machine = start(Options::new(75));
    for (bytes, works) in [
        (0, false),
        (1, false),
        (4097, false),
        (1 << 31, false),
        (8192, true),
    ] {
        let address = alloc_exactly(&machine.api(), bytes);
        assert_eq!(!address.is_null(), works, "{bytes}");
        free(&machine.api(), address);
    }
}

#[test]
fn a_mapping_is_taken_back_at_its_own_length() {
    let machine = start(Options::new(75));
    let session = Session::new(&machine, 75);
    let memory = alloc(&session.api, 8192).unwrap();
    let delayed = FASTRPC_MAP_FD_DELAYED;
    assert_eq!(announce(&session.api, CDSP_DOMAIN_ID, memory, delayed), 0);
    let part = Memory {
        bytes: 4096,
        ..memory
    };
    assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, part), code::EBADPARM);
    assert_eq!(retract(&session.api, CDSP_DOMAIN_ID, memory), 0);
    assert_eq!(machine.refusals("fastrpc_munmap"), 1);
}

#[test]
fn the_dsp_maps_whole_pages_only() {
    let machine = start(Options::new(75));
    let mut session = Session::new(&machine, 75);
    session.start().unwrap();
    let (memory, _, _) = session.memory(8192);
    let refused = (STATUS_MAP_FAILED, MAP_REFUSED);
    assert_eq!(map(&mut session, 9, memory, 8191), refused);
    assert_eq!(map(&mut session, 9, memory, 8192).0, STATUS_OK);
}

#[test]
fn a_thread_without_a_large_stack_does_not_start() {
    let machine = start(Options::new(75));
    let session = Session::new(&machine, 75);
    let too_small = STACK_NEEDED_BYTES.cast_signed() - 1;
    for (stack_size, result) in [
        (-1, Err(ERROR_STACK)),
        (too_small, Err(ERROR_STACK)),
        (1 << 17, Ok(())),
    ] {
        assert_eq!(ask_for_stack(&session.api, -1, stack_size), 0);
        assert_eq!(session.start().map(|_| ()), result, "{stack_size}");
    }
    for stack_size in [-2, 0, (16 << 10) - 1, (8 << 20) + 1] {
        assert_eq!(ask_for_stack(&session.api, -1, stack_size), code::EBADPARM);
    }
    assert_eq!(ask_for_stack(&session.api, 2, 1 << 18), code::EBADPARM);
}

#[test]
fn a_session_name_ends_in_nul() {
    let machine = start(Options::new(75));
    let mut new = ReserveNewSession {
        domain_name: Domain::Cdsp.name().as_ptr(),
        domain_name_len: 4,
        session_name: c"two".as_ptr(),
        session_name_len: 3,
        effective_domain_id: 0,
        session_id: 0,
    };
    let mut reserve = || session_control(&machine.api(), FASTRPC_RESERVE_NEW_SESSION, &mut new);
    assert_eq!(reserve(), code::EBADPARM);
    new.session_name_len = 4;
    let mut reserve = || session_control(&machine.api(), FASTRPC_RESERVE_NEW_SESSION, &mut new);
    assert_eq!(reserve(), 0);
}
