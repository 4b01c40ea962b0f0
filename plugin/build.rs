//! Compiles `ggml-glue/` once for each version of ggml's backend API, against ggml's own headers.

include!("../ggml-glue/compile.rs");

fn main() {
    println!("cargo::rustc-check-cfg=cfg(glue)");
    let plugin = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let root = plugin.join("..");
    let found = headers(&root);
    if let Some(missing) = APIS.iter().find(|api| !found.contains_key(api)) {
        let text = format!(
            "no headers of ggml's backend API {missing}; run make fetch, or set GGML_INCLUDE to ggml's source folders"
        );
        // Lints, documentation and the tests of other crates need no headers. Only release builds,
        // which users get, require them.
        if env::var("PROFILE").as_deref() == Ok("release") {
            println!("cargo::error={text}");
        } else {
            println!("cargo::warning={text}; the plugin refuses every program");
        }
        return;
    }
    println!("cargo::rustc-cfg=glue");
    for api in APIS {
        compile_glue(&root, &found[&api], api);
    }
    watched(plugin.join("glue/host.h"));
    let mut host = compiler(&root, &found[&APIS[0]]);
    host.file(watched(plugin.join("glue/host.c")));
    host.compile("plugin_host");
    // The library is never unloaded: a program that loads it twice gets the same one, and its
    // threads always keep their code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
