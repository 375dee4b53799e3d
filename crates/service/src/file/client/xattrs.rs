//! Extended attributes.

use byway_reactor::Errno;

use super::super::wire::Method;
use super::{Ask, Caller, Client};

impl Client {
    /// An extended attribute.
    ///
    /// # Errors
    /// See [`Client::look_up`]; `E2BIG` for a value of more than 16 KiB.
    pub fn get_xattr(&self, caller: Caller<'_>, node: u64, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let ask = Ask { name, ..Self::on_node(caller, node) };
        Ok(self.ask(Method::GetXattr, &ask)?.1.payload)
    }

    /// Sets one.
    ///
    /// # Errors
    /// See [`Client::look_up`]; `E2BIG` for a value of more than about 16 KiB.
    pub fn set_xattr(&self, caller: Caller<'_>, node: u64, name: &[u8], value: &[u8], flags: u32) -> Result<(), Errno> {
        let repeatable = flags == 0;
        let ask = Ask { name, data: value, flags, repeatable, ..Self::on_node(caller, node) };
        self.ask(Method::SetXattr, &ask).map(|_| ())
    }

    /// The names of all, each with a 0 byte behind it.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn list_xattrs(&self, caller: Caller<'_>, node: u64) -> Result<Vec<u8>, Errno> {
        Ok(self.ask(Method::ListXattrs, &Self::on_node(caller, node))?.1.payload)
    }

    /// Removes one.
    ///
    /// # Errors
    /// See [`Client::look_up`].
    pub fn remove_xattr(&self, caller: Caller<'_>, node: u64, name: &[u8]) -> Result<(), Errno> {
        let ask = Ask { name, repeatable: false, ..Self::on_node(caller, node) };
        self.ask(Method::RemoveXattr, &ask).map(|_| ())
    }
}
