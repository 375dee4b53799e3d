//! The kernel modules to load for some wanted ones, in order.

use anyhow::{Context, Result};
use std::collections::HashMap;

/// The lines of `modules.dep` and `modules.builtin`, by the modules' names.
pub struct Modules {
    /// Path of a module, then the paths of what it needs, in the reverse of their loading order.
    files: HashMap<String, Vec<String>>,
    builtin: Vec<String>,
}

impl Modules {
    /// Reads the text of `modules.dep` (`path: path path`) and of `modules.builtin` (a path a line).
    pub fn parse(dependencies: &str, builtin: &str) -> Self {
        let files = dependencies.lines().filter_map(|line| {
            let (path, needs) = line.split_once(':')?;
            let paths = std::iter::once(path).chain(needs.split_whitespace()).map(str::to_owned);
            Some((name(path), paths.collect()))
        });
        Self { files: files.collect(), builtin: builtin.lines().map(name).collect() }
    }

    /// The paths to load for the modules called `wanted`, each once, what is needed first.
    pub fn closure(&self, wanted: &[&str]) -> Result<Vec<&str>> {
        let mut order: Vec<&str> = Vec::new();
        for module in wanted.iter().map(|module| name(module)) {
            if self.builtin.contains(&module) {
                continue;
            }
            let files = self.files.get(&module).with_context(|| format!("the kernel has no module {module}"))?;
            for path in files.iter().rev() {
                if !order.contains(&path.as_str()) {
                    order.push(path);
                }
            }
        }
        Ok(order)
    }
}

/// `kernel/lib/crc-t10dif.ko.xz` is the module `crc_t10dif`.
fn name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_comes_before_it_and_once() {
        let dependencies = "k/ext4.ko.xz: k/mbcache.ko.xz k/jbd2.ko.xz k/crc-16.ko.xz\n\
                            k/jbd2.ko.xz: k/crc-16.ko.xz\nk/nbd.ko.xz:\nk/crc-16.ko.xz:\nk/mbcache.ko.xz:\n";
        let modules = Modules::parse(dependencies, "k/virtio_pci.ko\n");
        let order = modules.closure(&["virtio-pci", "crc_16", "ext4", "nbd"]).unwrap();
        assert_eq!(order, ["k/crc-16.ko.xz", "k/jbd2.ko.xz", "k/mbcache.ko.xz", "k/ext4.ko.xz", "k/nbd.ko.xz"]);
        assert!(modules.closure(&["btrfs"]).is_err());
    }
}
