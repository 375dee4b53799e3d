//! Gives the shared object the name that programs are linked to, with the version whose interface it has.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let part = |name| std::env::var(name).unwrap_or_default();
    let (major, minor) = (part("CARGO_PKG_VERSION_MAJOR"), part("CARGO_PKG_VERSION_MINOR"));
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libbyway.so.{major}.{minor}");
}
