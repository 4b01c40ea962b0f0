//! Proves that `include/npu.h` is the current output of cbindgen for `src/abi/`, that a C compiler
//! lays its structs out as rustc does, and that ggml's types are those of its headers.

use std::path::Path;
use std::process::Command;

use ggml_rust_npu::abi::{NpuHost, NpuNode, NpuTensor};
use ggml_rust_npu::gguf::GgmlType;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn npu_h_is_up_to_date() {
    let config = cbindgen::Config::from_file(root().join("cbindgen.toml")).unwrap();
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root().join("src/abi/types.rs"))
        .with_src(root().join("src/abi/mod.rs"))
        .generate()
        .unwrap();
    let mut want = Vec::new();
    bindings.write(&mut want);
    let want = String::from_utf8(want).unwrap();
    let path = root().join("include/npu.h");
    if std::env::var_os("UPDATE_NPU_H").is_some() {
        std::fs::write(&path, &want).unwrap();
    }
    let have = std::fs::read_to_string(&path).unwrap();
    assert!(
        have == want,
        "include/npu.h is stale: UPDATE_NPU_H=1 cargo test --test header"
    );
}

#[test]
fn c_and_rust_agree_on_sizes_and_offsets() {
    use std::mem::offset_of;
    let asserts = [
        ("sizeof(npu_tensor)", size_of::<NpuTensor>()),
        ("sizeof(npu_node)", size_of::<NpuNode>()),
        ("sizeof(npu_host)", size_of::<NpuHost>()),
        ("offsetof(npu_tensor, ne)", offset_of!(NpuTensor, ne)),
        ("offsetof(npu_tensor, nb)", offset_of!(NpuTensor, nb)),
        ("offsetof(npu_tensor, data)", offset_of!(NpuTensor, data)),
        (
            "offsetof(npu_tensor, buffer)",
            offset_of!(NpuTensor, buffer),
        ),
        ("offsetof(npu_tensor, name)", offset_of!(NpuTensor, name)),
        (
            "offsetof(npu_node, op_params)",
            offset_of!(NpuNode, op_params),
        ),
        ("offsetof(npu_node, dst)", offset_of!(NpuNode, dst)),
        ("offsetof(npu_node, src)", offset_of!(NpuNode, src)),
    ];
    let mut source = String::from("#include \"npu.h\"\n");
    for (what, value) in asserts {
        source += &format!("_Static_assert({what} == {value}, \"{what}\");\n");
    }
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("npu_layout.c");
    std::fs::write(&file, source).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let status = Command::new(&compiler)
        .args([
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsyntax-only",
            "-I",
        ])
        .arg(root().join("include"))
        .arg(&file)
        .status()
        .unwrap_or_else(|error| panic!("cannot run the C compiler {compiler}: {error}"));
    assert!(
        status.success(),
        "the C compiler disagrees about {}",
        file.display()
    );
}

#[test]
#[ignore = "needs GGML_BINDINGS, made of ggml's headers: make test fetches them"]
fn types_are_those_of_ggmls_headers() {
    for mut header in test_kit::Header::of_each("GGML_BINDINGS") {
        let types: Vec<(String, i64)> = (header.values("GGML_TYPE_").into_iter())
            .map(|(name, number)| (name.to_owned(), number))
            .filter(|(name, _)| name != "COUNT")
            .collect();
        assert!(types.len() > 30, "{types:?}");
        for (name, number) in types {
            let number = u32::try_from(number).unwrap();
            let known = GgmlType::from_number(number).unwrap_or_else(|| panic!("{name} is new"));
            assert_eq!(known.name(), name);
            if known.is_quantized() {
                let block = format!("block_{}", name.to_lowercase().replace("_k", "_K"));
                header.expect_size(&block, known.block_bytes());
            }
        }
        header.check();
    }
}
