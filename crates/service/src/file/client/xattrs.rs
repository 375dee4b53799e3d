//! Extended attributes.

use byway_reactor::Errno;

use super::super::wire::Method;
use super::leases::Fact;
use super::{Ask, Caller, Client};

impl Client {
    /// An extended attribute.
    ///
    /// # Errors
    /// See [`Client::look_up`]; `E2BIG` for a value of more than 16 KiB.
    pub fn get_xattr(&self, caller: Caller<'_>, node: u64, name: &[u8]) -> Result<Vec<u8>, Errno> {
        let absent = Fact::NoXattr(name.to_vec());
        if self.knows(caller, node, &absent) {
            return Err(Errno::NODATA);
        }
        let (ask, ticket) = (Ask { name, ..Self::on_node(caller, node) }, self.ticket(node));
        let asked = self.ask(Method::GetXattr, &ask);
        if matches!(asked, Err(Errno::NODATA)) {
            self.learn_fact(caller, ticket, node, absent);
        }
        Ok(asked?.1.payload)
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
        if self.knows(caller, node, &Fact::NoXattrs) {
            return Ok(Vec::new());
        }
        let ticket = self.ticket(node);
        let names = self.ask(Method::ListXattrs, &Self::on_node(caller, node))?.1.payload;
        if names.is_empty() {
            self.learn_fact(caller, ticket, node, Fact::NoXattrs);
        }
        Ok(names)
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
