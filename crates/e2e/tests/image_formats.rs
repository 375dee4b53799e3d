//! Images of virtual machines: neither served nor copied to a volume as if they were disks, unless told to.

use byway_e2e::{Server, SkipReason, binary, find_tool, run, run_well, skip};

#[test]
fn an_image_of_another_format_is_no_disk_unless_its_bytes_are_asked_for() {
    let Some(qemu_img) = find_tool("qemu-img") else {
        return skip(
            "an_image_of_another_format_is_no_disk_unless_its_bytes_are_asked_for",
            SkipReason::MissingTool("qemu-img"),
        );
    };
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let at = |name: &str| folder.path().join(name).display().to_string();
    for format in ["qcow2", "qed", "vmdk", "vdi", "vhdx", "vpc"] {
        let image = at(format);
        run_well(&qemu_img, &["create", "-q", "-f", format, &image, "4M"]);
        let name = if format == "vpc" { "vhd" } else { format };
        let volume = format!("v={image}");
        let refused = run(&binary(), &["serve", "--volume", &volume, "--listen", "tcp://127.0.0.1:0"]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(&format!("is a {name} image")), "{format}: {said}");
        assert!(said.contains("qemu-img convert -O raw") && said.contains("format=raw"), "{format}: {said}");

        let bytes = std::fs::read(&image).unwrap();
        let (image_volume, room) =
            (format!("v={image},ro,format=raw"), format!("room=mem:{}", bytes.len().next_multiple_of(4096)));
        let server = Server::start(
            folder.path(),
            1,
            &["--volume", &image_volume, "--volume", &room, "--listen", "tcp://127.0.0.1:0"],
        );
        let uri = |volume: &str| format!("byway://127.0.0.1:{}/{volume}", server.port("byway"));
        // From file to file an image is copied as it is, and so it is out of a volume that was told to show it.
        for (from, to) in [(&image, "copy"), (&uri("v"), "out")] {
            run_well(&binary(), &["copy", "--overwrite", from, &at(to)]);
            assert!(std::fs::read(at(to)).unwrap() == bytes, "{format}: {from}");
        }
        let refused = run(&binary(), &["copy", &image, &uri("room")]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(&format!("is a {name} image")), "{format}: {said}");
        assert!(said.contains("--raw"), "{format}: {said}");
        run_well(&binary(), &["copy", "--raw", &image, &uri("room"), "--resume", &at("resume")]);
    }
}
