"""Matrix products of a few rows, in tiles that stay in registers.

Each number of a result is added up in the same order in whatever tile it lies, so a row does not depend on how many
there are.
"""

from typing import Any

from slipstream.engine.compiled.code import COUNT, Code, Vectors, count


def write_product(module: Any, name: str, across: int, vectors: Vectors, *, adds: bool) -> Any:
    """C [rows, columns] = A [rows, depth] @ B [depth, columns], for `across` vectors of columns; with `adds` C + that.

    Without `adds` B's next columns are fetched from memory meanwhile. Parameters of the function: places of A, B and C,
    each with the distance of its rows; depth; rows.
    """
    tiles = [_write_tile(module, f"{name}_{rows}", (rows, across), vectors, adds=adds) for rows in _heights(vectors)]
    code = Code(module, name, _parameters(vectors) | {"rows": COUNT}, vectors)
    rows, build = code["rows"], code.build
    num_tiles = build.udiv(build.add(rows, count(vectors.rows - 1)), count(vectors.rows))
    height = build.udiv(build.add(rows, build.sub(num_tiles, count(1))), num_tiles)
    with code.loop(count(0), rows, height) as turn:
        behind = code.function.append_basic_block()
        choice = build.switch(code.least(height, build.sub(rows, turn.index)), behind)
        for num_rows, tile in zip(_heights(vectors), tiles, strict=True):
            choice.add_case(count(num_rows), block := code.function.append_basic_block())
            build.position_at_end(block)
            a, c = (code.at(code[each], turn.index, code[f"{each}_row"]) for each in ("a", "c"))
            code.call(tile, a, code["a_row"], code["b"], code["b_row"], c, code["c_row"], code["depth"])
            build.branch(behind)
        build.position_at_end(behind)
    return code.finish()


def _heights(vectors: Vectors) -> range:
    return range(1, vectors.rows + 1)


def _parameters(vectors: Vectors) -> dict[str, Any]:
    kinds = {"a": vectors.pointer, "b": vectors.pointer, "c": vectors.pointer}
    return {name: kind for each in kinds for name, kind in ((each, kinds[each]), (f"{each}_row", COUNT))} | {
        "depth": COUNT
    }


def _write_tile(module: Any, name: str, shape: tuple[int, int], vectors: Vectors, *, adds: bool) -> Any:
    """The same for so many rows, and vectors of columns."""
    rows, across = shape
    code = Code(module, name, _parameters(vectors), vectors)
    a_rows = [code.at(code["a"], count(row), code["a_row"]) for row in range(rows)]
    zeros = [code.filled(0.0)] * (rows * across)
    with code.loop(count(0), code["depth"], count(1), zeros) as turn:
        b_row = code.at(code["b"], turn.index, code["b_row"])
        b = [code.read(code.at(b_row, count(column * vectors.lanes))) for column in range(across)]
        if not adds:
            for column in range(across):
                code.prefetch(code.at(b_row, count(vectors.width + column * vectors.lanes)))
        a = [code.spread(code.build.load(code.at(a_row, turn.index))) for a_row in a_rows]
        pairs = [(of_a, of_b) for of_a in a for of_b in b]
        turn.following = [code.multiply_add(*pair, added) for pair, added in zip(pairs, turn.carried, strict=True)]
    for number, result in enumerate(turn.carried):
        row, column = divmod(number, across)
        place = code.at(code.at(code["c"], count(row), code["c_row"]), count(column * vectors.lanes))
        code.write(code.build.fadd(code.read(place), result) if adds else result, place)
    return code.finish()
