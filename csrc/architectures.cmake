# Which GPUs the CUDA kernels are compiled for.

# FP8's conversions are instructions from this compute capability on.
set(te_dist_lowest_arch 89)

# What the compiler knows, of the architectures that the kernels can have.
function(te_dist_known_archs compiler known)
  execute_process(COMMAND ${compiler} --list-gpu-arch OUTPUT_VARIABLE listed ERROR_QUIET)
  string(REGEX MATCHALL "compute_[0-9]+" listed "${listed}")
  set(found)
  foreach(name IN LISTS listed)
    string(REPLACE "compute_" "" arch ${name})
    if(NOT arch LESS te_dist_lowest_arch)
      list(APPEND found ${arch})
    endif()
  endforeach()
  set(${known} "${found}" PARENT_SCOPE)
endfunction()

# archs <- those of the GPUs that `capabilities` names ("9.0" in some text), once each. For one that is newer than the
# compiler, the last one that this knows, whose PTX the driver translates. old <- those that are too old.
function(te_dist_archs_of capabilities known archs old)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" named "${capabilities}")
  string(REPLACE "." "" named "${named}")
  set(chosen)
  set(unable)
  foreach(arch IN LISTS named)
    set(best)
    foreach(candidate IN LISTS known)
      if(NOT candidate GREATER arch AND (NOT best OR candidate GREATER best))
        set(best ${candidate})
      endif()
    endforeach()
    if(best)
      list(APPEND chosen ${best})
    else()
      list(APPEND unable ${arch})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES chosen)
  list(REMOVE_DUPLICATES unable)
  set(${archs} "${chosen}" PARENT_SCOPE)
  set(${old} "${unable}" PARENT_SCOPE)
endfunction()

# Ends the build where somebody asks for what cannot be.
function(te_dist_check_archs archs)
  foreach(arch IN LISTS archs)
    if(arch MATCHES "^([0-9]+)" AND CMAKE_MATCH_1 LESS te_dist_lowest_arch)
      message(FATAL_ERROR "TE_DIST_CUDA_ARCHS names ${arch}, but the CUDA kernels need ${te_dist_lowest_arch} or above. "
                          "With TE_DIST_WITH_CUDA=OFF, torch's own operations do their work.")
    endif()
  endforeach()
endfunction()
