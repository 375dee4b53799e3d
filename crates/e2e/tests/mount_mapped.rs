//! Files of a mount that a program changes by calls and through a shared mapping at the same time.

use std::path::Path;

use byway_e2e::far::compiled;
use byway_e2e::{MountRig, lacks_mounts, run};

/// Several threads write to the same pages at the same moment, by calls and by stores: none of it is lost.
#[test]
fn writes_and_stores_to_one_page_are_both_kept() {
    if lacks_mounts() {
        return;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mount_mapped/mapped_writes.c");
    for options in [",users=squash:0", ",users=squash:0,writers=exclusive"] {
        let rig = MountRig::new(options);
        let Some(program) = compiled(&source, &rig.path("")) else { return };
        let _server = rig.serve();
        let mount = rig.mount("mount", &rig.unix(), &[]);
        let file = mount.path("file").display().to_string();
        let output = run(&program, &[&file, "512", "10"]);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "with {options}: {}\n{said}", output.status);
        mount.unmount();
    }
}
