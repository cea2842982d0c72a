//! Memory that a policy has from its start, in place of memory that it grows.
//!
//! An instance serves one call. Where it grows its memory, the host changes the pages' protection, and changes it back
//! when the instance ends, which is a good part of a short call. Languages' allocators grow for their first allocation,
//! whatever the memory's size is. So a module's memory is made larger by [`ROOM`], and its instructions `memory.grow` and
//! `memory.size` become calls of two functions that hand out the room first. The sizes that the module sees are those
//! that it would have seen; an access beyond them, which would have trapped, finds zeros within the room.

use wasm_encoder::reencode::{Error, Reencode, utils};
use wasm_encoder::{
    BlockType, CodeSection, ConstExpr, Function, FunctionSection, GlobalSection, GlobalType, Instruction,
    MemoryType, Module, TypeSection, ValType,
};
use wasmparser::{Operator, Parser, Payload, TypeRef};

/// Pages of 64 KiB: what the allocators of C, C++, Zig and Rust take for a common request.
const ROOM: u32 = 16;

/// Pages that a memory can have.
const MOST: u32 = 65_536;

/// Where the memory ends for the module, once it has really grown.
const GROWN: i32 = -1;

/// A copy of the module whose memory has room, or none where it would not serve: where the module never grows its
/// memory, has it from elsewhere, or bounds it.
pub(super) fn with_room(module: &[u8]) -> Result<Option<Vec<u8>>, Error> {
    let Some(mut roomy) = Roomy::of(module)? else { return Ok(None) };
    let mut out = Module::new();
    roomy.parse_core_module(&mut out, Parser::new(0), module)?;
    Ok(Some(out.finish()))
}

/// What is added, by its index, and what it must know.
struct Roomy {
    /// Pages of the memory as the module declares it.
    pages: u32,
    /// Of `() -> i32`; that of `(i32) -> i32` is the next.
    types: u32,
    /// Of what stands in for `memory.size`; the next stands in for `memory.grow`.
    functions: u32,
    /// Pages that the module has, or [`GROWN`].
    global: u32,
}

impl Roomy {
    fn of(module: &[u8]) -> Result<Option<Self>, Error> {
        let (mut types, mut functions, mut globals) = (0, 0, None);
        let (mut imported_globals, mut memories, mut grows) = (0, Vec::new(), false);
        for payload in Parser::new(0).parse_all(module) {
            match payload? {
                Payload::TypeSection(section) => {
                    for group in section {
                        types += group?.types().len() as u32;
                    }
                }
                Payload::ImportSection(section) => {
                    for import in section.into_imports() {
                        match import?.ty {
                            TypeRef::Func(_) | TypeRef::FuncExact(_) => functions += 1,
                            TypeRef::Global(_) => imported_globals += 1,
                            TypeRef::Memory(_) => return Ok(None),
                            TypeRef::Table(_) | TypeRef::Tag(_) => {}
                        }
                    }
                }
                Payload::FunctionSection(section) => functions += section.count(),
                Payload::GlobalSection(section) => globals = Some(section.count()),
                Payload::MemorySection(section) => {
                    memories = section.into_iter().collect::<Result<_, _>>()?;
                }
                Payload::CodeSectionEntry(body) => {
                    for operator in body.get_operators_reader()? {
                        grows |= matches!(operator?, Operator::MemoryGrow { .. });
                    }
                }
                _ => {}
            }
        }
        // A section of globals to add one to is in all that a compiler made.
        let (Some(globals), [memory], true) = (globals, &memories[..], grows) else { return Ok(None) };
        if memory.memory64 || memory.shared || memory.page_size_log2.is_some() || memory.maximum.is_some() {
            return Ok(None);
        }
        let pages = u32::try_from(memory.initial).ok().filter(|pages| *pages <= MOST - ROOM);
        Ok(pages.map(|pages| Self { pages, types, functions, global: imported_globals + globals }))
    }

    fn limit(&self) -> i32 {
        (self.pages + ROOM).cast_signed()
    }

    /// `memory.size`.
    fn size(&self) -> Function {
        let mut code = Function::new([]);
        code.instructions()
            .global_get(self.global)
            .i32_const(GROWN)
            .i32_ne()
            .if_(BlockType::Result(ValType::I32))
            .global_get(self.global)
            .else_()
            .memory_size(0)
            .end()
            .end();
        code
    }

    /// `memory.grow`.
    fn grow(&self) -> Function {
        const PAGES: u32 = 0;
        const BEFORE: u32 = 1;
        let mut code = Function::new([(1, ValType::I32)]);
        code.instructions()
            .global_get(self.global)
            .local_tee(BEFORE)
            .i32_const(GROWN)
            .i32_eq()
            .if_(BlockType::Empty)
            .local_get(PAGES)
            .memory_grow(0)
            .return_()
            .end()
            // The room is enough.
            .local_get(PAGES)
            .i32_const(self.limit())
            .local_get(BEFORE)
            .i32_sub()
            .i32_le_u()
            .if_(BlockType::Empty)
            .local_get(BEFORE)
            .local_get(PAGES)
            .i32_add()
            .global_set(self.global)
            .local_get(BEFORE)
            .return_()
            .end()
            // It is a part, and what it lacks follows it: allocators count on memory that goes on.
            .memory_size(0)
            .i32_const(self.limit())
            .i32_eq()
            .if_(BlockType::Empty)
            .local_get(PAGES)
            .i32_const(self.limit())
            .local_get(BEFORE)
            .i32_sub()
            .i32_sub()
            .memory_grow(0)
            .i32_const(-1)
            .i32_eq()
            .if_(BlockType::Empty)
            .i32_const(-1)
            .return_()
            .end()
            .i32_const(GROWN)
            .global_set(self.global)
            .local_get(BEFORE)
            .return_()
            .end()
            // Something else has grown the memory: WASI's adapter does.
            .local_get(PAGES)
            .memory_grow(0)
            .local_tee(BEFORE)
            .i32_const(-1)
            .i32_ne()
            .if_(BlockType::Empty)
            .i32_const(GROWN)
            .global_set(self.global)
            .end()
            .local_get(BEFORE)
            .end();
        code
    }
}

impl Reencode for Roomy {
    type Error = std::convert::Infallible;

    fn instruction<'a>(&mut self, operator: Operator<'a>) -> Result<Instruction<'a>, Error> {
        match operator {
            Operator::MemorySize { .. } => Ok(Instruction::Call(self.functions)),
            Operator::MemoryGrow { .. } => Ok(Instruction::Call(self.functions + 1)),
            operator => utils::instruction(self, operator),
        }
    }

    fn memory_type(&mut self, memory: wasmparser::MemoryType) -> Result<MemoryType, Error> {
        let memory = utils::memory_type(self, memory);
        Ok(MemoryType { minimum: memory.minimum + u64::from(ROOM), ..memory })
    }

    fn parse_type_section(
        &mut self,
        types: &mut TypeSection,
        section: wasmparser::TypeSectionReader<'_>,
    ) -> Result<(), Error> {
        utils::parse_type_section(self, types, section)?;
        types.ty().function([], [ValType::I32]);
        types.ty().function([ValType::I32], [ValType::I32]);
        Ok(())
    }

    fn parse_function_section(
        &mut self,
        functions: &mut FunctionSection,
        section: wasmparser::FunctionSectionReader<'_>,
    ) -> Result<(), Error> {
        utils::parse_function_section(self, functions, section)?;
        functions.function(self.types).function(self.types + 1);
        Ok(())
    }

    fn parse_global_section(
        &mut self,
        globals: &mut GlobalSection,
        section: wasmparser::GlobalSectionReader<'_>,
    ) -> Result<(), Error> {
        utils::parse_global_section(self, globals, section)?;
        let counter = GlobalType { val_type: ValType::I32, mutable: true, shared: false };
        globals.global(counter, &ConstExpr::i32_const(self.pages.cast_signed()));
        Ok(())
    }

    fn parse_code_section(
        &mut self,
        code: &mut CodeSection,
        section: wasmparser::CodeSectionReader<'_>,
    ) -> Result<(), Error> {
        utils::parse_code_section(self, code, section)?;
        code.function(&self.size()).function(&self.grow());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use wasmtime::{Engine, Instance, Memory, Module, Store, TypedFunc};

    use super::*;

    /// Grows its memory by what it is asked, and tells what it sees.
    const GROWS: &str = r#"(module
        (import "host" "unused" (func))
        (global (mut i32) (i32.const 7))
        (memory (export "memory") 2)
        (func (export "grow") (param i32) (result i32) (memory.grow (local.get 0)))
        (func (export "size") (result i32) (memory.size)))"#;

    struct Grown {
        store: Store<()>,
        memory: Memory,
        grow: TypedFunc<i32, i32>,
        size: TypedFunc<(), i32>,
    }

    impl Grown {
        fn of(module: &[u8]) -> Self {
            let engine = Engine::default();
            let module = Module::new(&engine, module).unwrap();
            let mut store = Store::new(&engine, ());
            let unused = wasmtime::Func::wrap(&mut store, || ());
            let instance = Instance::new(&mut store, &module, &[unused.into()]).unwrap();
            let memory = instance.get_memory(&mut store, "memory").unwrap();
            let grow = instance.get_typed_func(&mut store, "grow").unwrap();
            let size = instance.get_typed_func(&mut store, "size").unwrap();
            Self { store, memory, grow, size }
        }

        /// What the module is told of where new memory begins, and of its end.
        fn grow(&mut self, pages: i32) -> (i32, i32) {
            let at = self.grow.call(&mut self.store, pages).unwrap();
            (at, self.size.call(&mut self.store, ()).unwrap())
        }
    }

    fn roomy() -> Vec<u8> {
        with_room(&wat::parse_str(GROWS).unwrap()).unwrap().expect("it grows")
    }

    #[test]
    fn a_module_sees_the_memory_that_it_would_have_seen() {
        for steps in [[1, 2, 3, 0], [16, 0, 1, 1], [15, 2, 0, 1], [40, 1, 0, 2], [-1, 65_536, 1, 70_000]] {
            let (mut plain, mut roomy) = (Grown::of(GROWS.as_bytes()), Grown::of(&roomy()));
            for step in steps {
                assert_eq!(roomy.grow(step), plain.grow(step), "{steps:?} at {step}");
            }
        }
    }

    #[test]
    fn the_memory_grows_only_by_what_the_room_lacks() {
        let mut roomy = Grown::of(&roomy());
        let pages = |roomy: &Grown| roomy.memory.size(&roomy.store);
        assert_eq!(pages(&roomy), 18);
        assert_eq!((roomy.grow(10), pages(&roomy)), ((2, 12), 18));
        assert_eq!((roomy.grow(8), pages(&roomy)), ((12, 20), 20));
    }

    #[test]
    fn beyond_its_memory_a_module_finds_the_room() {
        let loads = GROWS.replace("(memory.size)", "(memory.size) (drop (i32.load (i32.const 131072)))");
        let roomy = with_room(&wat::parse_str(&loads).unwrap()).unwrap().unwrap();
        let end = |module: &[u8]| {
            let mut grown = Grown::of(module);
            grown.size.call(&mut grown.store, ()).ok()
        };
        assert_eq!((end(loads.as_bytes()), end(&roomy)), (None, Some(2)));
    }

    #[test]
    fn what_another_grew_is_not_handed_out() {
        let mut roomy = Grown::of(&roomy());
        assert_eq!(roomy.memory.grow(&mut roomy.store, 1).unwrap(), 18);
        assert_eq!((roomy.grow(10), roomy.grow(7)), ((2, 12), (19, 26)));
    }

    #[test]
    fn a_module_that_would_not_gain_stays_as_it_is() {
        let plain = GROWS.replace("(memory.grow (local.get 0))", "(i32.const -1)");
        let bounded = GROWS.replace(") 2)", ") 2 3)");
        let shared = GROWS
            .replace("(global", "(import \"env\" \"memory\" (memory 1)) (global")
            .replace("(memory (export \"memory\") 2)", "");
        for module in [plain, bounded, shared] {
            assert!(with_room(&wat::parse_str(&module).unwrap()).unwrap().is_none(), "{module}");
        }
    }
}
