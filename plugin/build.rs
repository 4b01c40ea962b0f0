//! Compiles `ggml-glue/` once for each version of ggml's backend API, against ggml's own headers.
//!
//! The headers are those of `GGML_INCLUDE`, a list of ggml's source folders separated by colons, or
//! those that `make fetch` puts into `target/src/`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Folders, from that of the workspace, into which `make fetch` puts ggml.
const FETCHED: [&str; 2] = [
    "target/src/llama.cpp-0.5.0/ggml",
    "target/src/llama.cpp-0.6.0/ggml",
];

/// The versions of the backend API that the plugin serves.
const APIS: [u32; 2] = [2, 3];

/// The names of the glue that its files share: the two copies need two of each.
const SHARED_NAMES: [&str; 7] = [
    "ggml_backend_rust_npu_reg",
    "glue_backend_new",
    "glue_backend_set_n_threads",
    "glue_device_init_bufts",
    "glue_is_ours",
    "glue_node",
    "glue_tensor",
];

const GLUE: [&str; 3] = ["reg.c", "buffer.c", "graph.c"];

fn main() {
    println!("cargo::rerun-if-env-changed=GGML_INCLUDE");
    println!("cargo::rustc-check-cfg=cfg(glue)");
    let plugin = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let root = plugin.join("..");
    let folders = match env::var("GGML_INCLUDE") {
        Ok(list) => list.split(':').map(PathBuf::from).collect(),
        Err(_) => FETCHED.map(|folder| root.join(folder)).to_vec(),
    };
    let mut found = BTreeMap::new();
    for folder in &folders {
        let header = folder.join("src/ggml-backend-impl.h");
        println!("cargo::rerun-if-changed={}", header.display());
        if let Some(api) = api_of(&header) {
            found.entry(api).or_insert(folder);
        }
    }
    if let Some(missing) = APIS.iter().find(|api| !found.contains_key(api)) {
        let text = format!(
            "no headers of ggml's backend API {missing}; run make fetch, or set GGML_INCLUDE to ggml's source folders"
        );
        // Lints, documentation and the tests of other crates need no headers; what is given to
        // users does.
        if env::var("PROFILE").as_deref() == Ok("release") {
            println!("cargo::error={text}");
        } else {
            println!("cargo::warning={text}; the plugin refuses every program");
        }
        return;
    }
    println!("cargo::rustc-cfg=glue");
    for api in APIS {
        compile_glue(&root, &plugin, found[&api], api);
    }
    let mut host = compiler(&root, found[&APIS[0]]);
    host.file(watched(plugin.join("glue/host.c")));
    host.compile("plugin_host");
    // A program that asks twice gets the same answer, and threads outlive no code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
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
        // In functions of ggml's headers.
        .flag("-Wno-unused-function")
        .flag("-fvisibility=hidden")
        .include(watched(root.join("include")))
        .include(ggml.join("include"))
        .include(ggml.join("src"));
    build
}

fn compile_glue(root: &Path, plugin: &Path, ggml: &Path, api: u32) {
    let mut build = compiler(root, ggml);
    for name in SHARED_NAMES {
        build.define(name, format!("{name}_api{api}").as_str());
    }
    watched(root.join("ggml-glue/glue.h"));
    watched(plugin.join("glue/host.h"));
    for file in GLUE {
        build.file(watched(root.join("ggml-glue").join(file)));
    }
    build.file(watched(plugin.join("glue/differs.c")));
    build.compile(&format!("plugin_glue_api{api}"));
}
