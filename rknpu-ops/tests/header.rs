//! The structs and values of the C ABI are those of Rockchip's own headers, as bindgen reads them.

use rknpu_ops::ffi::code;
use rknpu_ops::ffi::{
    CoreMask, IoAttr, Layout, MAX_DIMS, MAX_DYNAMIC_SHAPES, MAX_NAME_LEN, MatmulInfo, MatmulShape,
    MatmulType, MemSync, QUERY_SDK_VERSION, QuantParams, QuantType, SdkVersion, TensorAttr,
    TensorMem, TensorType, mem_flags,
};
use test_kit::{Header, layout};

#[test]
#[ignore = "needs RKNN_BINDINGS, made of Rockchip's headers: make test fetches them"]
fn structs_and_values_are_those_of_rockchips_headers() {
    let mut header = Header::of("RKNN_BINDINGS");
    layout!(header, MatmulInfo = "rknn_matmul_info" {
        m = "M", k = "K", n = "N", matmul_type = "type", b_layout = "B_layout",
        b_quant_type = "B_quant_type", ac_layout = "AC_layout", ac_quant_type = "AC_quant_type",
        iommu_domain_id = "iommu_domain_id", group_size = "group_size", reserved = "reserved",
    });
    layout!(header, TensorAttr = "rknn_matmul_tensor_attr" {
        name = "name", n_dims = "n_dims", dims = "dims", size = "size", tensor_type = "type",
    });
    layout!(header, IoAttr = "rknn_matmul_io_attr" { a = "A", b = "B", c = "C" });
    layout!(header, QuantParams = "rknn_quant_params" {
        name = "name", scale = "scale", scale_len = "scale_len", zp = "zp", zp_len = "zp_len",
    });
    layout!(header, MatmulShape = "rknn_matmul_shape" { m = "M", k = "K", n = "N" });
    layout!(header, TensorMem = "rknn_tensor_mem" {
        virt_addr = "virt_addr", phys_addr = "phys_addr", fd = "fd", offset = "offset",
        size = "size", flags = "flags", priv_data = "priv_data",
    });
    layout!(header, SdkVersion = "rknn_sdk_version" {
        api_version = "api_version", drv_version = "drv_version",
    });
    let values: &[(&str, i32)] = &[
        (
            "RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT32",
            MatmulType::F16_F16_F32.0,
        ),
        ("RKNN_INT8_MM_INT8_TO_INT32", MatmulType::I8_I8_I32.0),
        ("RKNN_INT8_MM_INT8_TO_INT8", MatmulType::I8_I8_I8.0),
        (
            "RKNN_FLOAT16_MM_FLOAT16_TO_FLOAT16",
            MatmulType::F16_F16_F16.0,
        ),
        ("RKNN_FLOAT16_MM_INT8_TO_FLOAT32", MatmulType::F16_I8_F32.0),
        ("RKNN_FLOAT16_MM_INT8_TO_FLOAT16", MatmulType::F16_I8_F16.0),
        ("RKNN_FLOAT16_MM_INT4_TO_FLOAT32", MatmulType::F16_I4_F32.0),
        ("RKNN_FLOAT16_MM_INT4_TO_FLOAT16", MatmulType::F16_I4_F16.0),
        ("RKNN_INT8_MM_INT8_TO_FLOAT32", MatmulType::I8_I8_F32.0),
        ("RKNN_INT4_MM_INT4_TO_INT16", MatmulType::I4_I4_I16.0),
        ("RKNN_INT8_MM_INT4_TO_INT32", MatmulType::I8_I4_I32.0),
        (
            "RKNN_FLOAT16_MM_INT4_TO_BFLOAT16",
            MatmulType::F16_I4_BF16.0,
        ),
        ("RKNN_INT8_MM_INT4_TO_FLOAT16", MatmulType::I8_I4_F16.0),
        ("RKNN_NPU_CORE_AUTO", CoreMask::AUTO.0),
        ("RKNN_NPU_CORE_0", CoreMask::CORE_0.0),
        ("RKNN_NPU_CORE_1", CoreMask::CORE_1.0),
        ("RKNN_NPU_CORE_2", CoreMask::CORE_2.0),
        ("RKNN_NPU_CORE_0_1", CoreMask::CORE_0_1.0),
        ("RKNN_NPU_CORE_0_1_2", CoreMask::CORE_0_1_2.0),
        ("RKNN_NPU_CORE_ALL", CoreMask::ALL.0),
        ("RKNN_TENSOR_FLOAT32", TensorType::F32.0),
        ("RKNN_TENSOR_FLOAT16", TensorType::F16.0),
        ("RKNN_TENSOR_INT8", TensorType::I8.0),
        ("RKNN_TENSOR_INT16", TensorType::I16.0),
        ("RKNN_TENSOR_INT32", TensorType::I32.0),
        ("RKNN_TENSOR_INT4", TensorType::I4.0),
        ("RKNN_TENSOR_BFLOAT16", TensorType::BF16.0),
        ("RKNN_MEMORY_SYNC_TO_DEVICE", MemSync::TO_DEVICE.0),
        ("RKNN_MEMORY_SYNC_FROM_DEVICE", MemSync::FROM_DEVICE.0),
        ("RKNN_MEMORY_SYNC_BIDIRECTIONAL", MemSync::BIDIRECTIONAL.0),
        ("RKNN_QUERY_SDK_VERSION", QUERY_SDK_VERSION),
        ("RKNN_SUCC", code::SUCC),
        ("RKNN_ERR_FAIL", code::FAIL),
        ("RKNN_ERR_TIMEOUT", code::TIMEOUT),
        ("RKNN_ERR_DEVICE_UNAVAILABLE", code::DEVICE_UNAVAILABLE),
        ("RKNN_ERR_MALLOC_FAIL", code::MALLOC_FAIL),
        ("RKNN_ERR_PARAM_INVALID", code::PARAM_INVALID),
        ("RKNN_ERR_MODEL_INVALID", code::MODEL_INVALID),
        ("RKNN_ERR_CTX_INVALID", code::CTX_INVALID),
        ("RKNN_ERR_INPUT_INVALID", code::INPUT_INVALID),
        ("RKNN_ERR_OUTPUT_INVALID", code::OUTPUT_INVALID),
        ("RKNN_ERR_DEVICE_UNMATCH", code::DEVICE_UNMATCH),
        (
            "RKNN_ERR_INCOMPATILE_PRE_COMPILE_MODEL",
            code::INCOMPATIBLE_PRE_COMPILE_MODEL,
        ),
        (
            "RKNN_ERR_INCOMPATILE_OPTIMIZATION_LEVEL_VERSION",
            code::INCOMPATIBLE_OPTIMIZATION_LEVEL,
        ),
        (
            "RKNN_ERR_TARGET_PLATFORM_UNMATCH",
            code::TARGET_PLATFORM_UNMATCH,
        ),
    ];
    for (name, value) in values {
        header.expect(name, *value);
    }
    for (name, value) in [
        ("RKNN_MM_LAYOUT_NORM", Layout::NORM.0),
        ("RKNN_MM_LAYOUT_NATIVE", Layout::NATIVE.0),
        ("RKNN_MM_LAYOUT_TP_NORM", Layout::TP_NORM.0),
        ("RKNN_QUANT_TYPE_PER_LAYER_SYM", QuantType::PER_LAYER_SYM.0),
        (
            "RKNN_QUANT_TYPE_PER_LAYER_ASYM",
            QuantType::PER_LAYER_ASYM.0,
        ),
        (
            "RKNN_QUANT_TYPE_PER_CHANNEL_SYM",
            QuantType::PER_CHANNEL_SYM.0,
        ),
        (
            "RKNN_QUANT_TYPE_PER_CHANNEL_ASYM",
            QuantType::PER_CHANNEL_ASYM.0,
        ),
        ("RKNN_QUANT_TYPE_PER_GROUP_SYM", QuantType::PER_GROUP_SYM.0),
        (
            "RKNN_QUANT_TYPE_PER_GROUP_ASYM",
            QuantType::PER_GROUP_ASYM.0,
        ),
    ] {
        header.expect(name, value);
    }
    for (name, value) in [
        (
            "RKNN_TENSOR_MEMORY_FLAGS_ALLOC_INSIDE",
            mem_flags::ALLOC_INSIDE,
        ),
        ("RKNN_TENSOR_MEMORY_FLAGS_FROM_FD", mem_flags::FROM_FD),
        ("RKNN_TENSOR_MEMORY_FLAGS_FROM_PHYS", mem_flags::FROM_PHYS),
    ] {
        header.expect(name, value);
    }
    header.expect("RKNN_MAX_DIMS", MAX_DIMS as i64);
    header.expect("RKNN_MAX_NAME_LEN", MAX_NAME_LEN as i64);
    header.expect("RKNN_MAX_DYNAMIC_SHAPE_NUM", MAX_DYNAMIC_SHAPES as i64);
    header.check();
}
