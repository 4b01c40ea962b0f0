//! The structs and values of the C ABI are those of FastRPC's own headers, as bindgen reads them.

use hexagon_ops::ffi::{
    self, ControlLatency, Domain, DspCapability, GetUri, RemoteArg, ReserveNewSession,
    SessionClose, ThreadParams, UnsignedModule, attribute,
};
use test_kit::{Header, layout};

#[test]
#[ignore = "needs FASTRPC_BINDINGS, made of FastRPC's headers: make test fetches them"]
fn structs_and_values_are_those_of_fastrpcs_headers() {
    let mut header = Header::of("FASTRPC_BINDINGS");
    // The largest member of the union `remote_arg`.
    layout!(header, RemoteArg = "remote_buf" { pv = "pv", len = "nLen" });
    header.expect_size("remote_arg", size_of::<RemoteArg>());
    layout!(header, DspCapability = "remote_dsp_capability" {
        domain = "domain", attribute_id = "attribute_ID", capability = "capability",
    });
    layout!(header, UnsignedModule = "remote_rpc_control_unsigned_module" {
        domain = "domain", enable = "enable",
    });
    layout!(header, ThreadParams = "remote_rpc_thread_params" {
        domain = "domain", prio = "prio", stack_size = "stack_size",
    });
    layout!(header, SessionClose = "remote_rpc_session_close" { domain = "domain" });
    layout!(header, ControlLatency = "remote_rpc_control_latency" {
        enable = "enable", latency = "latency",
    });
    layout!(header, ReserveNewSession = "remote_rpc_reserve_new_session" {
        domain_name = "domain_name", domain_name_len = "domain_name_len",
        session_name = "session_name", session_name_len = "session_name_len",
        effective_domain_id = "effective_domain_id", session_id = "session_id",
    });
    layout!(header, GetUri = "remote_rpc_get_uri" {
        domain_name = "domain_name", domain_name_len = "domain_name_len",
        session_id = "session_id", module_uri = "module_uri", module_uri_len = "module_uri_len",
        uri = "uri", uri_len = "uri_len",
    });
    header.expect("CDSP_DOMAIN_ID", Domain::Cdsp.id());
    header.expect("CDSP1_DOMAIN_ID", Domain::Cdsp1.id());
    header.expect("FASTRPC_MAP_FD", ffi::FASTRPC_MAP_FD);
    header.expect("FASTRPC_MAP_FD_DELAYED", ffi::FASTRPC_MAP_FD_DELAYED);
    for (name, value) in [
        (
            "RPCMEM_HEAP_ID_SYSTEM",
            ffi::RPCMEM_HEAP_ID_SYSTEM.cast_unsigned(),
        ),
        ("RPCMEM_DEFAULT_FLAGS", ffi::RPCMEM_DEFAULT_FLAGS),
        ("RPCMEM_FLAG_UNCACHED", ffi::RPCMEM_FLAG_UNCACHED),
        ("RPCMEM_TRY_MAP_STATIC", ffi::RPCMEM_TRY_MAP_STATIC),
        ("FASTRPC_THREAD_PARAMS", ffi::FASTRPC_THREAD_PARAMS),
        (
            "DSPRPC_CONTROL_UNSIGNED_MODULE",
            ffi::DSPRPC_CONTROL_UNSIGNED_MODULE,
        ),
        ("FASTRPC_SESSION_CLOSE", ffi::FASTRPC_SESSION_CLOSE),
        (
            "FASTRPC_RESERVE_NEW_SESSION",
            ffi::FASTRPC_RESERVE_NEW_SESSION,
        ),
        ("FASTRPC_GET_URI", ffi::FASTRPC_GET_URI),
        ("DSPRPC_CONTROL_LATENCY", ffi::DSPRPC_CONTROL_LATENCY),
        ("DSPRPC_GET_DSP_INFO", ffi::DSPRPC_GET_DSP_INFO),
        ("RPC_PM_QOS", ffi::RPC_PM_QOS),
        ("RPC_POLL_QOS", ffi::RPC_POLL_QOS),
        ("DOMAIN_SUPPORT", attribute::DOMAIN_SUPPORT),
        ("UNSIGNED_PD_SUPPORT", attribute::UNSIGNED_PD_SUPPORT),
        ("HVX_SUPPORT_64B", attribute::HVX_SUPPORT_64B),
        ("HVX_SUPPORT_128B", attribute::HVX_SUPPORT_128B),
        ("VTCM_PAGE", attribute::VTCM_PAGE),
        ("VTCM_COUNT", attribute::VTCM_COUNT),
        ("ARCH_VER", attribute::ARCH_VER),
        ("HMX_SUPPORT_DEPTH", attribute::HMX_SUPPORT_DEPTH),
        ("HMX_SUPPORT_SPATIAL", attribute::HMX_SUPPORT_SPATIAL),
        ("ASYNC_FASTRPC_SUPPORT", attribute::ASYNC_FASTRPC_SUPPORT),
        (
            "STATUS_NOTIFICATION_SUPPORT",
            attribute::STATUS_NOTIFICATION_SUPPORT,
        ),
    ] {
        header.expect(name, value);
    }
    header.check();
}
