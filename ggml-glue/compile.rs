// A part of two build scripts, the plugin's and that of the feature `register`. Compiles the glue
// for each version of ggml's backend API, with ggml's headers of that version.
//
// The headers come from `GGML_INCLUDE`, a list of ggml's source folders separated by colons, or
// from `target/src/`, where `make fetch` puts them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Folders, from that of the workspace, into which `make fetch` puts ggml.
const FETCHED: [&str; 2] = [
    "target/src/llama.cpp-0.5.0/ggml",
    "target/src/llama.cpp-0.6.0/ggml",
];

/// The versions of the backend API that the glue is written for.
const APIS: [u32; 2] = [2, 3];

/// The names that the files of the glue share. Each copy of the glue needs separate ones.
const SHARED_NAMES: [&str; 21] = [
    "ggml_backend_rust_npu_reg",
    "glue_backend_new",
    "glue_backend_set_abort_callback",
    "glue_backend_set_n_threads",
    "glue_computes_on_cpu",
    "glue_cpu_backend",
    "glue_cpu_free",
    "glue_cpu_set_abort_callback",
    "glue_cpu_set_n_threads",
    "glue_cpu_supports",
    "glue_device_init_bufts",
    "glue_differs",
    "glue_is_npu_buffer",
    "glue_is_of_slices",
    "glue_is_ours",
    "glue_mark_cpu_reader",
    "glue_node",
    "glue_only_device_writes",
    "glue_params_are_known",
    "glue_prove_params",
    "glue_tensor",
];

const GLUE: [&str; 6] = [
    "reg.c",
    "buffer.c",
    "cpu.c",
    "graph.c",
    "params.c",
    "differs.c",
];

/// Returns a folder with ggml's sources for each version of the API that has one.
fn headers(root: &Path) -> BTreeMap<u32, PathBuf> {
    println!("cargo::rerun-if-env-changed=GGML_INCLUDE");
    let folders = match env::var("GGML_INCLUDE") {
        Ok(list) => list.split(':').map(PathBuf::from).collect(),
        Err(_) => FETCHED.map(|folder| root.join(folder)).to_vec(),
    };
    let mut found = BTreeMap::new();
    for folder in folders {
        let header = folder.join("src/ggml-backend-impl.h");
        println!("cargo::rerun-if-changed={}", header.display());
        if let Some(api) = api_of(&header).filter(|api| APIS.contains(api)) {
            found.entry(api).or_insert(folder);
        }
    }
    found
}

/// Returns the version of the backend API that a header defines.
fn api_of(header: &Path) -> Option<u32> {
    let text = fs::read_to_string(header).ok()?;
    let mut words = text.split_whitespace();
    words.find(|word| *word == "GGML_BACKEND_API_VERSION")?;
    words.next()?.parse().ok()
}

fn watched(file: PathBuf) -> PathBuf {
    println!("cargo::rerun-if-changed={}", file.display());
    file
}

fn compiler(root: &Path, ggml: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .std("c11")
        .warnings(true)
        .extra_warnings(true)
        // ggml's headers have unused static functions.
        .flag("-Wno-unused-function")
        .flag("-fvisibility=hidden")
        .include(watched(root.join("include")))
        .include(ggml.join("include"))
        .include(ggml.join("src"));
    build
}

/// Compiles a copy of the glue whose names end in `_api2` or `_api3`.
fn compile_glue(root: &Path, ggml: &Path, api: u32) {
    let mut build = compiler(root, ggml);
    for name in SHARED_NAMES {
        build.define(name, format!("{name}_api{api}").as_str());
    }
    watched(root.join("ggml-glue/glue.h"));
    for file in GLUE {
        build.file(watched(root.join("ggml-glue").join(file)));
    }
    build.compile(&format!("npu_glue_api{api}"));
}
