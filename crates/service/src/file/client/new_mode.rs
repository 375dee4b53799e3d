//! The rights of new files.

/// Rights of a file that is made.
#[derive(Clone, Copy, Debug)]
pub struct NewMode {
    /// The type (of nodes) and the rights that a program asks for.
    pub mode: u32,
    /// The program's umask. It is ignored in a directory that has a default ACL.
    pub umask: u32,
}

impl From<u32> for NewMode {
    /// Just this mode.
    fn from(mode: u32) -> Self {
        Self { mode, umask: 0 }
    }
}

impl NewMode {
    /// The mode that is left, and the rights that were taken from it.
    pub(super) fn split(self) -> (u32, u64) {
        let masked = self.mode & self.umask & 0o777;
        (self.mode & !masked, masked.into())
    }
}
