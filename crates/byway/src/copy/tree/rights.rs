//! Rights and other attributes of a copy.
//!
//! Where a file has an ACL, the group's bits of its mode are the ACL's mask: the most that any user or group of the ACL may have. A
//! destination that refuses the ACL would give these rights to the owning group, which may have had fewer. There the group gets what the
//! ACL gives it.

use rustix::io::Errno;

use super::failure::Failure;
use super::run::{Run, add};
use super::side::{Attributed, Facts};

/// Extended attributes that belong to a file's user. Others are the system's (`security.`, `trusted.`).
const XATTRS_COPIED: [&[u8]; 2] = [b"user.", b"system.posix_acl_"];

/// The ACL of a file itself; a directory may have one for new files besides.
const ACCESS_ACL: &[u8] = b"system.posix_acl_access";

/// An ACL as `linux/posix_acl_xattr.h` has it: a version, and entries of a tag, rights and a number.
const ACL_VERSION: u32 = 2;
const ACL_ENTRY_BYTES: usize = 8;
const ACL_GROUP_OBJ: u16 = 0x04;
const ACL_MASK: u16 = 0x10;

/// The group's bits of a mode.
const GROUP_BITS: u32 = 0o070;

/// The rights that an ACL gives to the owning group; none if the ACL cannot be read.
fn group_rights(acl: &[u8]) -> u32 {
    let Some((version, entries)) = acl.split_first_chunk() else { return 0 };
    if u32::from_le_bytes(*version) != ACL_VERSION {
        return 0;
    }
    let rights = |wanted: u16| {
        let mut entries = entries.chunks_exact(ACL_ENTRY_BYTES);
        let entry = entries.find(|entry| u16::from_le_bytes([entry[0], entry[1]]) == wanted)?;
        Some(u32::from(u16::from_le_bytes([entry[2], entry[3]])) & 7)
    };
    rights(ACL_GROUP_OBJ).unwrap_or(0) & rights(ACL_MASK).unwrap_or(7)
}

/// A mode in which the group has the rights that an ACL gives it.
fn without_acl(mode: u32, acl: &[u8]) -> u32 {
    mode & !GROUP_BITS | group_rights(acl) << 3
}

/// The ACL of a file, if it has one; empty if it is too long to be read.
fn acl_of(file: &dyn Attributed) -> Result<Option<Vec<u8>>, Errno> {
    match file.xattr(ACCESS_ACL) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(Errno::TOOBIG | Errno::RANGE) => Ok(Some(Vec::new())),
        acl => acl.map(Some),
    }
}

impl Run {
    /// Gives a copy the attributes of its source. `unset` is the failure of the last step.
    pub(super) fn copy_attributes(
        &self,
        from: &dyn Attributed,
        facts: &Facts,
        to: &dyn Attributed,
        path: &[u8],
        unset: impl FnOnce(Errno) -> Failure,
    ) -> Result<(), Failure> {
        let refused_acl = self.copy_xattrs(from, to, path)?;
        let mode = refused_acl.map_or(facts.mode, |acl| without_acl(facts.mode, &acl));
        to.take_attributes(&Facts { mode, ..*facts }).map_err(unset)
    }

    /// The rights that a complete copy has, if its mode is not the source's: those of [`Run::copy_attributes`].
    ///
    /// # Errors
    /// It is not known whether one of the two has an ACL: without that, the group could get the rights of the mask.
    pub(super) fn mode_of_complete(
        &self,
        from: &dyn Attributed,
        facts: &Facts,
        to: &dyn Attributed,
        [path, new_path]: [&[u8]; 2],
    ) -> Result<u32, Failure> {
        let doing = "read its attributes";
        let (mode, place) = (facts.mode_of_copy(), self.source(path));
        let acl = acl_of(from).map_err(|source| Failure::Call { place, doing, source })?;
        let Some(acl) = acl else { return Ok(mode) };
        let place = self.destination(new_path);
        let has_acl = acl_of(to).map_err(|source| Failure::Call { place, doing, source })?.is_some();
        Ok(if has_acl { mode } else { without_acl(mode, &acl) })
    }

    /// Copies the extended attributes of a file or directory that its user has set. What the destination refuses is counted. Gives the
    /// source's ACL if that was refused; it is empty if it could not be read.
    fn copy_xattrs(&self, from: &dyn Attributed, to: &dyn Attributed, path: &[u8]) -> Result<Option<Vec<u8>>, Failure> {
        let unreadable = |source| Failure::Call { place: self.source(path), doing: "read its attributes", source };
        let names = match from.xattr_names() {
            Err(Errno::OPNOTSUPP) => return Ok(None),
            names => names.map_err(unreadable)?,
        };
        let mut refused_acl = None;
        for name in names.iter().filter(|name| XATTRS_COPIED.iter().any(|copied| name.starts_with(copied))) {
            let value = match from.xattr(name) {
                Err(Errno::NODATA) => continue,
                Err(Errno::TOOBIG | Errno::RANGE) => None,
                value => Some(value.map_err(unreadable)?),
            };
            match value.as_ref().map(|value| to.set_xattr(name, value)) {
                Some(Ok(())) => continue,
                None
                | Some(Err(
                    Errno::OPNOTSUPP | Errno::PERM | Errno::ACCESS | Errno::TOOBIG | Errno::RANGE | Errno::INVAL,
                )) => add(&self.counts.xattrs_refused, 1),
                Some(Err(source)) => {
                    return Err(Failure::Call { place: self.destination(path), doing: "set an attribute", source });
                }
            }
            if name == ACCESS_ACL {
                refused_acl = Some(value.unwrap_or_default());
            }
        }
        Ok(refused_acl)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use rustix::fs::FileType;

    use super::super::run::{Options, get};
    use super::super::side::Time;
    use super::*;

    /// A file with one extended attribute at most.
    #[derive(Default)]
    struct File {
        acl: RefCell<Option<Vec<u8>>>,
        /// What a read of the ACL fails with.
        fails: Option<Errno>,
        refuses_acls: bool,
        mode: Cell<u32>,
    }

    fn facts(mode: u32) -> Facts {
        let kind = FileType::RegularFile;
        Facts { kind, size: 0, allocated_bytes: 0, mode, accessed: Time::default(), modified: Time::default() }
    }

    impl Attributed for File {
        fn facts(&self) -> Result<Facts, Errno> {
            Ok(facts(self.mode.get()))
        }

        fn xattr_names(&self) -> Result<Vec<Vec<u8>>, Errno> {
            Ok(self.acl.borrow().iter().map(|_| ACCESS_ACL.to_vec()).collect())
        }

        fn xattr(&self, _: &[u8]) -> Result<Vec<u8>, Errno> {
            self.fails.map_or_else(|| self.acl.borrow().clone().ok_or(Errno::NODATA), Err)
        }

        fn set_xattr(&self, _: &[u8], value: &[u8]) -> Result<(), Errno> {
            if self.refuses_acls {
                return Err(Errno::OPNOTSUPP);
            }
            *self.acl.borrow_mut() = Some(value.to_vec());
            Ok(())
        }

        fn take_attributes(&self, of: &Facts) -> Result<(), Errno> {
            self.mode.set(of.mode_of_copy());
            Ok(())
        }

        fn sync(&self) -> Result<(), Errno> {
            Ok(())
        }
    }

    /// As `setfacl -m u:1000:rw` makes it of 0640: the owner rw, the user 1000 rw, the group r, the mask rw.
    fn acl() -> Vec<u8> {
        let entries: [(u16, u16, u32); 5] =
            [(0x01, 6, u32::MAX), (0x02, 6, 1000), (0x04, 4, u32::MAX), (0x10, 6, u32::MAX), (0x20, 0, u32::MAX)];
        let mut bytes = ACL_VERSION.to_le_bytes().to_vec();
        for (tag, rights, number) in entries {
            bytes.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
            bytes.extend(number.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn a_group_does_not_get_the_rights_of_an_acl_that_was_refused() {
        let options = Options { threads: 1, request_bytes: 4096, verify: false, overwrite: false };
        for (refuses_acls, mode) in [(false, 0o660), (true, 0o640)] {
            let run = Run::new(options, ["from", "to"].map(str::to_owned)).unwrap();
            let from = File { acl: Some(acl()).into(), ..File::default() };
            let to = File { refuses_acls, ..File::default() };
            run.copy_attributes(&from, &facts(0o4660), &to, b"file", |error| panic!("{error}")).unwrap();
            assert_eq!((to.mode.get(), get(&run.counts.xattrs_refused)), (mode, u64::from(refuses_acls)));
            // Nor when a later copy finds the file complete.
            let complete = |from: &File, to: &File| run.mode_of_complete(from, &facts(0o660), to, [b"file"; 2]);
            assert_eq!(complete(&from, &to).unwrap(), mode);
            // An ACL that cannot be read is not taken for none, on either side.
            let unreadable = |fails| File { fails: Some(fails), ..File::default() };
            assert!(complete(&unreadable(Errno::IO), &to).is_err() && complete(&from, &unreadable(Errno::IO)).is_err());
            assert_eq!(complete(&unreadable(Errno::TOOBIG), &File::default()).unwrap(), 0o600);
            assert_eq!(complete(&unreadable(Errno::OPNOTSUPP), &to).unwrap(), 0o660);
        }
    }

    #[test]
    fn the_groups_rights_are_those_of_its_entry_within_the_mask() {
        let mut acl = acl();
        assert_eq!(group_rights(&acl), 4);
        let (group, mask) = (4 + 2 * ACL_ENTRY_BYTES + 2, 4 + 3 * ACL_ENTRY_BYTES + 2);
        (acl[group], acl[mask]) = (7, 5);
        assert_eq!(group_rights(&acl), 5);
        acl[0] = 3;
        assert_eq!((group_rights(&acl), group_rights(&[])), (0, 0), "of a form that is not known");
    }
}
