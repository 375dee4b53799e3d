//! Where foreign clients come in: NBD and HTTP.
