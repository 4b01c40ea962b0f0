//! Compiles `ggml-glue/` into the library for the feature `register`; does nothing without it.

#[cfg(feature = "register")]
include!("ggml-glue/compile.rs");

#[cfg(feature = "register")]
fn main() {
    println!("cargo::rustc-check-cfg=cfg(glue_api2, glue_api3)");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let found = headers(&root);
    if found.is_empty() {
        println!(
            "cargo::error=no headers of ggml; set GGML_INCLUDE to the folder of ggml's sources, or run make fetch"
        );
    }
    for (api, ggml) in found {
        println!("cargo::rustc-cfg=glue_api{api}");
        compile_glue(&root, &ggml, api);
    }
}

#[cfg(not(feature = "register"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
