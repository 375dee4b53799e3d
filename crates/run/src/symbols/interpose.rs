//! How a function stands before the one of libc.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use rustix::io::Errno;

/// The next function of a name, found at its first call.
pub(super) struct Next {
    name: &'static CStr,
    at: AtomicPtr<c_void>,
}

impl Next {
    pub(super) const fn new(name: &'static CStr) -> Self {
        Self { name, at: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address; null if libc has none.
    pub(super) fn get(&self) -> *mut c_void {
        let known = self.at.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name ends with a 0 byte.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.at.store(found, Ordering::Release);
        found
    }

    pub(super) fn name(&self) -> &'static str {
        self.name.to_str().unwrap_or_default()
    }
}

/// What a function of libc gives when it fails.
pub(super) trait Failed {
    const FAILED: Self;
}

impl Failed for c_int {
    const FAILED: Self = -1;
}

impl Failed for isize {
    const FAILED: Self = -1;
}

impl Failed for i64 {
    const FAILED: Self = -1;
}

impl<T> Failed for *mut T {
    const FAILED: Self = std::ptr::null_mut();
}

/// Fails as a function of libc does.
pub(super) fn fail<T: Failed>(error: Errno) -> T {
    // SAFETY: the place is this thread's.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
    T::FAILED
}

/// What the program's call gets: this library's answer, or with `None` that of the next function.
pub(super) type Answer<T> = Option<Result<T, Errno>>;

/// Defines functions of libc, one for each name before the arguments. The body gives an [`Answer`].
macro_rules! interpose {
    (@each [$($name:ident)+] $arguments:tt $result:ty $body:block) => {
        $(interpose!(@one $name $arguments $result $body);)+
    };
    (@one $name:ident ($($argument:ident: $kind:ty),*) $result:ty $body:block) => {
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[allow(clippy::redundant_closure_call, reason = "the body may return early")]
        pub(super) unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            static NEXT: $crate::symbols::interpose::Next = {
                const NAME: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a name"),
                };
                $crate::symbols::interpose::Next::new(NAME)
            };
            let answer: $crate::symbols::interpose::Answer<$result> = if $crate::inside::is_inside() { None } else { (|| -> $crate::symbols::interpose::Answer<$result> { $body })() };
            match answer {
                Some(answer) => {
                    $crate::report::answered(NEXT.name());
                    answer.unwrap_or_else($crate::symbols::interpose::fail)
                }
                None => {
                    let next = NEXT.get();
                    if next.is_null() {
                        return $crate::symbols::interpose::fail(rustix::io::Errno::NOSYS);
                    }
                    // SAFETY: it is libc's function of this name, of this type, and has the program's arguments.
                    unsafe {
                        let next = std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($kind),*) -> $result>(next);
                        next($($argument),*)
                    }
                }
            }
        }
    };
    ($(fn $($name:ident)|+ ($($arguments:tt)*) -> $result:ty $body:block)*) => {
        $(interpose!(@each [$($name)+] ($($arguments)*) $result $body);)*
    };
}
